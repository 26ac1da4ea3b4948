// Tests the sources of a merge: matching by output tensor, arithmetic, comparison.
#include "lib/convert/weights/merge.h"

#include <gmock/gmock.h>

#include "lib/convert/conversion_source.h"
#include "tests/support/conversion_steps.h"
#include "tests/support/made_checkpoint.h"
#include "tests/support/temp_dir.h"

namespace reshard::merge_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Values = std::vector<float>;

// Two sources, a and b, of no known family.
class Merging : public testing::Test {
 protected:
  Merging() {
    options_.model = {false, nullptr};
    options_.spool = dir_.path();
    options_.run.memory = Index{1} << 30;
    options_.run.threads = 1;
  }
  void add_counts(std::uint8_t in_b) {
    a_.add("counts", DType::kUint8, {1}, {"\1", 1});
    b_.add("counts", DType::kUint8, {1}, {reinterpret_cast<const char*>(&in_b), 1});
  }
  // Returns the draft of a merge of a_ and b_.
  Result<Draft> match() {
    a_.write();
    b_.write();
    options_.merge = MergeOptions{};
    options_.merge->sources = {{"a", "path/a", &a_}, {"b", "path/b", &b_}};
    options_.merge->expression = expression_;
    options_.merge->others_from = others_from_;
    return make_draft(a_, kModels, options_);
  }
  ConversionSource& merged() {
    origin_.reset();
    draft_ = must(match());
    write_as(*draft_.merge, draft_.view.catalog, draft_.view.catalog);
    return *(origin_ = std::make_unique<ConversionSource>(draft_, a_, a_));
  }

  TempDir dir_;
  MadeCheckpoint a_{dir_.path(), "a"}, b_{dir_.path(), "b"};
  ConversionOptions options_;
  std::string expression_ = "a + 0.5*(b - a)", others_from_;
  Draft draft_;
  std::unique_ptr<ConversionSource> origin_;
};

TEST_F(Merging, EveryElementIsTheExpression) {
  a_.add("x", {2, 2}, {1, 2, 3, 4});
  a_.add("y", {1}, {8});
  b_.add("y", DType::kBFloat16, {1}, {"\x80\x40", 2});  // 4, at another place
  b_.add("x", {2, 2}, {3, 4, 5, 6});
  ConversionSource& origin = merged();
  EXPECT_EQ(draft_.merge->numbers, (std::vector<std::vector<std::size_t>>{{0, 1}, {1, 0}}));
  EXPECT_EQ(floats_of(origin.tensors(), "x"), (Values{2, 3, 4, 5}));
  EXPECT_EQ(floats_of(origin.tensors(), "y"), (Values{6}));
  EXPECT_TRUE(origin.finish(nullptr));
  EXPECT_EQ(origin.digests()->of(1).size(), 2U) << "of what was read of each source";
}

TEST_F(Merging, WhatHoldsNoFloatsHasToBeEqual) {
  a_.add("x", {1}, {1});
  b_.add("x", {1}, {3});
  add_counts(1);
  ConversionSource& origin = merged();
  EXPECT_TRUE(check_not_merged(*draft_.merge, origin.merged(), options_.run));
  EXPECT_EQ(bytes_of(origin.tensors(), "counts"), "\1");
}

TEST_F(Merging, WhatHoldsNoFloatsAndDiffersIsOneSources) {
  a_.add("x", {1}, {1});
  b_.add("x", {1}, {3});
  add_counts(2);
  ConversionSource& origin = merged();
  EXPECT_THAT(error_of(check_not_merged(*draft_.merge, origin.merged(), options_.run)),
              AllOf(HasSubstr("path/b: tensor 'counts' differs from that in path/a"), HasSubstr("--others-from NAME")));
  others_from_ = "b";
  ConversionSource& from_b = merged();
  EXPECT_TRUE(check_not_merged(*draft_.merge, from_b.merged(), options_.run));
  EXPECT_EQ(bytes_of(from_b.tensors(), "counts"), "\2");
  others_from_ = "c";
  EXPECT_THAT(error_of(match()), HasSubstr("--others-from: unknown source 'c'"));
}

TEST_F(Merging, SourcesHaveTheSameTensors) {
  a_.add("x", {1}, {1});
  a_.add("y", {1}, {1});
  b_.add("x", {1}, {3});
  EXPECT_THAT(error_of(match()), HasSubstr("path/b: not the same model as path/a: lacks 1 tensor: 'y'"));
  std::swap(options_.merge->sources[0].reader, options_.merge->sources[1].reader);
  EXPECT_THAT(error_of(make_draft(b_, kModels, options_)),
              HasSubstr("path/a: not the same model as path/b: lacks 1 tensor: 'y'"));
}

TEST_F(Merging, SourcesHaveTheSameShapes) {
  a_.add("x", {2}, {1, 2});
  b_.add("x", {1}, {3});
  EXPECT_THAT(error_of(match()), HasSubstr("tensor 'x' is float32 [1] here, float32 [2] there"));
}

TEST_F(Merging, FloatsAreMergedWithFloats) {
  a_.add("x", {1}, {1});
  b_.add("x", DType::kInt32, {1}, {"\1\0\0\0", 4});
  EXPECT_THAT(error_of(match()), HasSubstr("tensor 'x' is int32 [1] here, float32 [1] there"));
}

TEST_F(Merging, SourcesAreWeightsAsTheyAre) {
  a_.add("x.weight", {2, 1}, {1, 2});
  a_.add("x.lora_A.weight", {1, 1}, {1});
  a_.add("x.lora_B.weight", {2, 1}, {1, 2});
  b_.add("x.weight", {2, 1}, {1, 2});
  options_.selection.merge_adapter = true;
  options_.adapter.alpha = 1;
  EXPECT_THAT(error_of(match()), HasSubstr("path/a: has an adapter that is not merged into the weights"));
}

TEST_F(Merging, TheExpressionIsOfItsSources) {
  a_.add("x", {1}, {1});
  b_.add("x", {1}, {3});
  expression_ = "a + c";
  EXPECT_THAT(error_of(match()), HasSubstr("'c'"));
}

}  // namespace
}  // namespace reshard::merge_test
