// Compares repaired rows, which frameworks added or lost, with arrays that are cut and padded by hand.
#include "lib/convert/view/repair.h"

#include <gmock/gmock.h>

#include <random>

#include "lib/base/json.h"
#include "lib/convert/view/row_edits.h"
#include "tests/support/made_checkpoint.h"
#include "tests/support/temp_dir.h"

namespace reshard::repair_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Values = std::vector<float>;

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

ModelConfig config_of(const std::string& text) {
  auto config = ModelConfig::parse(*parse_json(text, "config.json"), "config.json");
  EXPECT_TRUE(config) << config.error().message();
  return *std::move(config);
}

Values random_values(Index n, std::uint32_t seed) {
  std::mt19937 random(seed);
  Values out(static_cast<std::size_t>(n));
  for (float& v : out) v = static_cast<float>(random() % 1000) + 1;
  return out;
}

Values rows(const Values& all, Index begin, Index end, Index width) {
  return {all.begin() + begin * width, all.begin() + end * width};
}

Values joined(Values a, const Values& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

constexpr const char* kLlama = R"({"model_type": "llama", "vocab_size": 10, "hidden_size": 4, "intermediate_size": 6,
  "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2})";

class Fit : public testing::Test {
 protected:
  RepairOptions options(const ModelConfig& config, const Family& family = *find_family("llama")) {
    RepairOptions o;
    o.family = &family;
    o.config = &config;
    o.spool = dir_.path();
    o.run.memory = Index{1} << 30;  // sanitizers take memory of their own
    return o;
  }
  TempDir dir_;
  MadeCheckpoint store_{dir_.path(), "data"};
  const ModelConfig config_ = config_of(kLlama);
};

TEST_F(Fit, RowsOfZerosBeyondTheVocabularyAreCut) {
  const Values true_rows = random_values(40, 1);
  Values zeros(24, 0.0f);
  zeros[5] = -0.0f;
  store_.add(kEmbedding, {16, 4}, joined(true_rows, zeros), 7);
  store_.add("optimizer.state.model.embed_tokens.weight.exp_avg", {16, 4}, joined(true_rows, Values(24, 0.0f)));
  store_.add(kHead, {10, 4}, true_rows);
  store_.write();
  const auto fitted = repair_to_config(store_.catalog(), store_.files(), options(config_));
  ASSERT_TRUE(fitted) << fitted.error().message();
  EXPECT_EQ(store_.read(kEmbedding), true_rows);
  EXPECT_EQ(store_.read("optimizer.state.model.embed_tokens.weight.exp_avg"), true_rows);
  EXPECT_THAT(fitted->notes, ElementsAre(HasSubstr("6 rows of zeros beyond the vocabulary of 10 are cut")));
  EXPECT_EQ(fitted->repairs.size(), 1U);
}

TEST_F(Fit, OtherRowsBeyondTheVocabularyAreCutOnlyWhenAsked) {
  const Values all = random_values(48, 2);
  store_.add(kEmbedding, {12, 4}, all);
  store_.write();
  const auto refused = repair_to_config(store_.catalog(), store_.files(), options(config_));
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("not zero"));
  EXPECT_THAT(refused.error().message(), HasSubstr("--repair vocab"));
  RepairOptions asked = options(config_);
  asked.repairs.vocabulary = true;
  ASSERT_TRUE(repair_to_config(store_.catalog(), store_.files(), asked));
  EXPECT_EQ(store_.read(kEmbedding), rows(all, 0, 10, 4));
}

TEST_F(Fit, LostRowsComeFromADonor) {
  const Values base = random_values(40, 3);
  Values trained = rows(base, 0, 6, 4);
  trained[9] += 1;
  store_.add(kEmbedding, {6, 4}, rows(base, 0, 6, 4));
  store_.add(kHead, {6, 4}, trained);
  store_.write();
  MadeCheckpoint donor(dir_.path(), "donor");
  donor.add(kEmbedding, {10, 4}, base, 8);
  donor.add(kHead, {10, 4}, base);
  donor.write();
  RepairOptions with = options(config_);
  const auto refused = repair_to_config(store_.catalog(), store_.files(), with);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("rows 6 to 9 are missing from this checkpoint"));
  with.repairs.vocabulary = true;
  with.donor = &donor;
  const auto fitted = repair_to_config(store_.catalog(), store_.files(), with);
  ASSERT_TRUE(fitted) << fitted.error().message();
  EXPECT_EQ(store_.read(kEmbedding), base);
  EXPECT_EQ(store_.read(kHead), joined(trained, rows(base, 6, 10, 4)));
  EXPECT_THAT(fitted->notes, ElementsAre(HasSubstr("equal the donor's"), HasSubstr("1 of the 6 other rows differ")));
}

TEST_F(Fit, CopiesOfHeadsAreMergedWhenTheyAgree) {
  const Values head0 = random_values(8, 4), head1 = random_values(8, 5);
  const std::string k = "model.layers.0.self_attn.k_proj.weight", v = "model.layers.0.self_attn.v_proj.weight";
  store_.add(k, {8, 4}, joined(joined(head0, head0), joined(head1, head1)), 2);
  store_.write();
  ASSERT_TRUE(repair_to_config(store_.catalog(), store_.files(), options(config_)));
  EXPECT_EQ(store_.read(k), joined(head0, head1));

  MadeCheckpoint bad(dir_.path(), "bad");
  Values other = head1;
  other[3] += 1;
  bad.add(v, {8, 4}, joined(joined(head0, head0), joined(head1, other)));
  bad.write();
  const auto refused = repair_to_config(bad.catalog(), bad.files(), options(config_));
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("has 2 times the rows"));
  EXPECT_EQ(bad.catalog().tensors()[0].shape, (Dims{8, 4})) << "an error leaves the view as it was";
}

TEST_F(Fit, ExpertsJoinedByAnUnshardedSaveAreSplit) {
  const ModelConfig config = config_of(R"({"model_type": "mixtral", "vocab_size": 10, "hidden_size": 4,
      "intermediate_size": 3, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
      "num_local_experts": 4})");
  const std::string experts = "model.layers.0.block_sparse_moe.experts.";
  std::vector<Values> true_values;
  for (std::uint32_t e = 0; e < 4; ++e) true_values.push_back(random_values(12, 10 + e));
  // ep = 2: key 0 holds experts 0 and 2, key 1 holds 1 and 3.
  store_.add(experts + "0.w1.weight", {6, 4}, joined(true_values[0], true_values[2]));
  store_.add(experts + "1.w1.weight", {6, 4}, joined(true_values[1], true_values[3]));
  store_.write();
  RepairOptions o = options(config, *find_family("mixtral"));
  const auto refused = repair_to_config(store_.catalog(), store_.files(), o);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("--repair experts"));
  o.repairs.experts = true;
  ASSERT_TRUE(repair_to_config(store_.catalog(), store_.files(), o));
  for (std::size_t e = 0; e < 4; ++e)
    EXPECT_EQ(store_.read(experts + std::to_string(e) + ".w1.weight"), true_values[e]) << e;
}

TEST_F(Fit, VocabulariesArePaddedByEachPolicy) {
  const Values all = {1, 2, 3, 4, 5, 9};
  for (const auto& [fill, row] : {std::pair(PaddingFill::kZero, Values{0, 0}),
                                  {PaddingFill::kRepeatLast, {5, 9}},
                                  {PaddingFill::kMean, {3, 5}}}) {
    MadeCheckpoint store(dir_.path(), "pad-" + std::string(padding_fill_name(fill)));
    store.add(kEmbedding, {3, 2}, all, 2);
    store.add("optimizer.state.model.embed_tokens.weight.exp_avg", {3, 2}, all);
    store.write();
    for (const std::size_t i : {0U, 1U})
      ASSERT_TRUE(pad_rows(store.catalog(), i, 5, fill, store.files(), dir_.path(), true));
    EXPECT_EQ(store.read(kEmbedding), joined(all, joined(row, row))) << padding_fill_name(fill);
    EXPECT_EQ(store.read("optimizer.state.model.embed_tokens.weight.exp_avg"), joined(all, Values(4, 0.0f)));
  }
}

TEST_F(Fit, HeadsAreRepeatedForRanksThatShareThem) {
  const Values head0 = random_values(8, 6), head1 = random_values(8, 7);
  store_.add("k", {4, 4}, joined(head0, head1), 3);
  store_.write();
  repeat_blocks(store_.catalog().tensor(0), 2, 3);
  EXPECT_EQ(store_.read("k"), joined(joined(head0, joined(head0, head0)), joined(head1, joined(head1, head1))));
}

}  // namespace
}  // namespace reshard::repair_test
