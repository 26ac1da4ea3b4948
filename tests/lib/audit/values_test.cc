#include "lib/audit/values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace reshard::values_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

RowSet rows(std::initializer_list<RowRange> ranges) {
  RowSet out;
  for (const RowRange& r : ranges) {
    out.ranges.push_back(r);
    out.count += r.end - r.begin;
  }
  return out;
}

// Tensors and their counts, like the result of a scan.
class Judged {
 public:
  // Returns an ordinary tensor after `change`.
  template <class Change>
  Judged& add(const std::string& name, DType dtype, const Dims& shape, Change change) {
    Tensor t;
    t.name = name;
    t.dtype = dtype;
    t.shape = shape;
    EXPECT_TRUE(catalog_.add(std::move(t)));
    TensorHealth h;
    h.elements = volume(shape);
    h.absmax = 0.5;
    h.constant = false;
    h.rows_seen = shape.rank() > 1;
    change(h);
    health_.push_back(h);
    return *this;
  }
  Judged& zero(const std::string& name, const Dims& shape, DType dtype = DType::kBFloat16) {
    return add(name, dtype, shape, [](TensorHealth& h) {
      h.zeros = h.elements;
      h.absmax = 0;
      h.constant = true;
    });
  }
  Judged& constant(const std::string& name, const Dims& shape) {
    return add(name, DType::kBFloat16, shape, [](TensorHealth& h) {
      h.absmax = 1;
      h.constant = true;
    });
  }
  std::vector<Finding> findings(const ValueContext& context = {}) const {
    return judge_values(catalog_, health_, context);
  }
  std::vector<std::string> ids(const ValueContext& context = {}) const {
    std::vector<std::string> out;
    for (const Finding& f : findings(context)) out.push_back(f.id);
    return out;
  }

 private:
  Catalog catalog_;
  std::vector<TensorHealth> health_;
};

constexpr auto kOrdinary = [](TensorHealth&) {};

TEST(Values, OrdinaryTensorsGiveNoFinding) {
  EXPECT_THAT(Judged()
                  .add("layers.0.attention.wq.weight", DType::kBFloat16, {64, 64}, kOrdinary)
                  .constant("norm.weight", {4096})
                  .zero("model.norm.weight", {4096})
                  .zero("transformer.h.0.ln_1.weight", {4096})
                  .zero("transformer.h.0.attn.c_attn.bias", {4096})
                  .zero("layers.0.attention_norm.bias", {4096})
                  .zero("optimizer.state.layers.0.attention.wq.weight.exp_avg", {64, 64}, DType::kFloat32)
                  .constant("optimizer.state.layers.0.attention.wq.weight.exp_avg_sq", {64, 64})
                  .zero("optimizer.state.layers.0.attention.wq.weight.step", {}, DType::kFloat32)
                  .zero("train_state.loss", {100}, DType::kFloat32)
                  .zero("layers.0.wq.lora_B.weight", {64, 16})
                  .constant("rotary_emb.cos_cached", {64, 64})
                  .zero("model.layers.0.mlp.experts.0.qzeros", {64, 64}, DType::kInt32)
                  .add("attn.causal_mask", DType::kBFloat16, {64, 64}, [](TensorHealth& h) { h.infs = 2016; })
                  .zero("scalar", {}, DType::kFloat32)
                  .zero("empty.weight", {0, 64})
                  .ids(),
              IsEmpty());
}

TEST(Values, NanAndInfinityAreErrorsInModelAndOptimizer) {
  const auto bad = [](TensorHealth& h) {
    h.nans = 12;
    h.infs = 3;
    h.first_not_finite_row = 1017;
  };
  const auto findings = Judged()
                            .add("layers.0.attention.wq.weight", DType::kBFloat16, {4096, 4096}, bad)
                            .add("optimizer.state.tok_embeddings.weight.exp_avg", DType::kFloat32, {4096, 64}, bad)
                            .add("dataloader.loss", DType::kFloat32, {4096}, bad)
                            .findings();
  ASSERT_THAT(findings, SizeIs(2));
  EXPECT_EQ(findings[0].id, "non-finite-weights");
  EXPECT_EQ(findings[0].severity, Severity::kError);
  EXPECT_EQ(findings[0].what, "NaN or infinite values in 1 model tensor");
  EXPECT_THAT(findings[0].why,
              ElementsAre("layers.0.attention.wq.weight: 12 NaN and 3 infinite of 16,777,216 elements, "
                          "the first at index 1,017 of dimension 0"));
  EXPECT_EQ(findings[1].id, "non-finite-optimizer");
  EXPECT_EQ(findings[1].severity, Severity::kError);
  EXPECT_EQ(findings[1].what, "NaN or infinite values in 1 tensor of optimizer state");
}

TEST(Values, FindingsOfOneKindAreFoldedAndTheWorstAreTold) {
  Judged judged;
  for (const Index layer : {10, 2, 0, 1, 3, 4, 5})
    judged.add("layers." + std::to_string(layer) + ".w.weight", DType::kFloat32, {64, 64}, [&](TensorHealth& h) {
      h.nans = layer + 1;
      h.first_not_finite_row = 0;
    });
  const auto findings = judged.findings();
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_EQ(findings[0].what, "NaN or infinite values in 7 model tensors");
  EXPECT_EQ(findings[0].tensors.front(), "layers.0.w.weight");
  EXPECT_EQ(findings[0].tensors.back(), "layers.10.w.weight");
  ASSERT_THAT(findings[0].why, SizeIs(6));
  EXPECT_THAT(findings[0].why[0], HasSubstr("layers.10.w.weight: 11 NaN"));
  EXPECT_EQ(findings[0].why[5], "and 2 more");
}

TEST(Values, WeightsOfZerosOrOfOneValueAreWarnings) {
  const auto findings = Judged()
                            .zero("layers.0.feed_forward.w1.weight", {64, 64})
                            .zero("layers.0.experts.w1", {8, 64, 64})
                            .zero("layers.0.ssm.A_log", {4096})
                            .constant("layers.1.feed_forward.w1.weight", {64, 64})
                            .constant("layers.1.ssm.A_log", {4096})
                            .findings();
  ASSERT_THAT(findings, SizeIs(2));
  EXPECT_EQ(findings[0].id, "zero-weights");
  EXPECT_EQ(findings[0].severity, Severity::kWarning);
  EXPECT_THAT(findings[0].tensors,
              ElementsAre("layers.0.experts.w1", "layers.0.feed_forward.w1.weight", "layers.0.ssm.A_log"));
  EXPECT_EQ(findings[1].id, "constant-weights");
  EXPECT_THAT(findings[1].why, ElementsAre("layers.1.feed_forward.w1.weight: 4,096 elements of magnitude 1"));
}

TEST(Values, RowsOfZerosAreAWarningOutsideTheVocabulary) {
  const auto findings = Judged()
                            .add("layers.0.attention.wq.weight", DType::kBFloat16, {4096, 64},
                                 [](TensorHealth& h) {
                                   h.rows.zero = rows({{1024, 2048}, {3000, 3001}});
                                   h.rows.constant = rows({{7, 8}});
                                 })
                            .findings();
  ASSERT_THAT(findings, SizeIs(2));
  EXPECT_EQ(findings[0].id, "zero-rows");
  EXPECT_THAT(findings[0].why, ElementsAre("layers.0.attention.wq.weight: 1,025 of 4,096 rows: 1,024..2,047; 3,000"));
  EXPECT_EQ(findings[1].id, "constant-rows");
  EXPECT_THAT(findings[1].why, ElementsAre("layers.0.attention.wq.weight: row 7"));
}

TEST(Values, RowsOfTheVocabularyAreNotes) {
  const auto some = [](TensorHealth& h) {
    h.rows.zero = rows({{128004, 128008}});
    h.tail.zero = rows({{128256, 128512}});
  };
  const ValueContext context{{"tok_embeddings.weight", "output.weight"}, 128256};
  const auto findings = Judged().add("tok_embeddings.weight", DType::kBFloat16, {128512, 64}, some).findings(context);
  ASSERT_THAT(findings, SizeIs(2));
  EXPECT_EQ(findings[0].id, "unused-tokens");
  EXPECT_EQ(findings[0].severity, Severity::kNote);
  EXPECT_THAT(findings[0].why,
              ElementsAre("tok_embeddings.weight: 4 of the 128,256 rows hold zeros: 128,004..128,007"));
  EXPECT_EQ(findings[1].id, "padding-rows");
  EXPECT_EQ(findings[1].severity, Severity::kNote);
  EXPECT_THAT(findings[1].why, ElementsAre("tok_embeddings.weight: 256 of the 256 rows after the true vocabulary of "
                                           "128,256 hold zeros: 128,256..128,511"));
}

TEST(Values, PaddingBeginsAtTheTrueSizeOfVocabularyTensorsOnly) {
  Tensor t;
  t.name = "output.weight";
  t.shape = {128512, 64};
  EXPECT_EQ(padding_begins(t, {{"output.weight"}, 128256}), 128256);
  EXPECT_EQ(padding_begins(t, {{"output.weight"}, 0}), -1);
  EXPECT_EQ(padding_begins(t, {{"output.weight"}, 128512}), -1);
  EXPECT_EQ(padding_begins(t, {{"tok_embeddings.weight"}, 128256}), -1);
}

TEST(Values, LargeMagnitudesAreNotes) {
  const auto of = [](double absmax) { return [absmax](TensorHealth& h) { h.absmax = absmax; }; };
  EXPECT_THAT(Judged().add("a.weight", DType::kFloat16, {64, 64}, of(65504)).ids(), ElementsAre("near-overflow"));
  EXPECT_THAT(Judged().add("a.weight", DType::kBFloat16, {64, 64}, of(20000)).ids(), ElementsAre("large-values"));
  EXPECT_THAT(Judged().add("a.weight", DType::kBFloat16, {64, 64}, of(9999)).ids(), IsEmpty());
  EXPECT_THAT(Judged().add("a.weight", DType::kFloat8E5M2, {64, 64}, of(57344)).ids(), IsEmpty());
  EXPECT_THAT(Judged().add("attn.causal_mask", DType::kFloat16, {64, 64}, of(65504)).ids(), IsEmpty());
  EXPECT_THAT(Judged().add("step", DType::kInt64, {}, of(1e9)).ids(), IsEmpty());
  EXPECT_THAT(Judged().add("optimizer.state.a.weight.exp_avg", DType::kFloat32, {64, 64}, of(1e9)).ids(), IsEmpty());
}

TEST(Values, RowsAreToldAsRanges) {
  EXPECT_EQ(rows_text(rows({{5, 6}})), "5");
  EXPECT_EQ(rows_text(rows({{128256, 128512}})), "128,256..128,511");
  EXPECT_EQ(rows_text(rows({{0, 2}, {3, 4}, {5, 6}, {7, 8}, {9, 11}})), "0..1; 3; 5; 7 and 2 more");
}

}  // namespace
}  // namespace reshard::values_test
