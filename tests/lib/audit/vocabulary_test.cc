#include "lib/audit/vocabulary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lib/layout/padded_vocabulary.h"

namespace reshard::vocabulary_test {
namespace {

using testing::Contains;
using testing::HasSubstr;

// Vocabularies of real models, their tensor-parallel parts, and the rows that ColossalAI 0.3.7 to 0.4.7 and 0.4.8
// saved.
struct Row {
  Index size, multiple, tp, padded, local, saved_before, saved_after;
};
constexpr Row kTable[] = {
    {128256, 64, 8, 128512, 16064, 16064, 128256},
    {128256, 64, 4, 128256, 32064, 128256, 128256},
    {128256, 64, 2, 128256, 64128, 128256, 128256},
    {128256, 32, 8, 128256, 16032, 128256, 128256},
    {32000, 64, 4, 32000, 8000, 32000, 32000},
    {32000, 64, 8, 32256, 4032, 4032, 32000},
    {32000, 64, 16, 32768, 2048, 2048, 32000},
    {151936, 64, 2, 151936, 75968, 151936, 151936},
    {151936, 64, 4, 152064, 38016, 38016, 151936},
    {151936, 64, 8, 152064, 19008, 19008, 151936},
    {151936, 64, 16, 152576, 9536, 9536, 151936},
    {50257, 64, 2, 50304, 25152, 25152, 50257},
    {50257, 64, 4, 50432, 12608, 12608, 50257},
    {65535, 64, 4, 65536, 16384, 16384, 65535},
    {30522, 64, 4, 30720, 7680, 7680, 30522},
    {32128, 64, 8, 32256, 4032, 4032, 32128},
    {50, 64, 2, 128, 64, 50, 50},
    {102400, 64, 8, 102400, 12800, 102400, 102400},
    {152064, 64, 8, 152064, 19008, 152064, 152064},
    {256000, 64, 8, 256000, 32000, 256000, 256000},
    {250880, 64, 8, 250880, 31360, 250880, 250880},
    {65024, 64, 8, 65024, 8128, 65024, 65024},
};

VocabularyContext context(Index size) { return {"config.json", size, 0, false}; }

TEST(Vocabulary, PadsAsMegatronAndColossalAiDo) {
  for (const Row& r : kTable) {
    EXPECT_EQ(padded_vocabulary(r.size, r.multiple, r.tp), r.padded) << r.size << " m " << r.multiple << " t " << r.tp;
    EXPECT_EQ(r.padded / r.tp, r.local);
  }
  EXPECT_EQ(padded_vocabulary(50257, 64, 1), 50304);
  EXPECT_EQ(padded_vocabulary(50257, 128, 8), 51200) << "Megatron's GPT-2 with tp=8";
}

TEST(Vocabulary, ExplainsEveryTruncationOfTheTable) {
  for (const Row& r : kTable) {
    const auto findings = audit_vocabulary({{"embed", r.saved_before, 2}}, context(r.size));
    if (r.saved_before == r.size) {
      EXPECT_TRUE(findings.empty()) << r.size << " is whole";
      continue;
    }
    EXPECT_THAT(explain_shard(r.saved_before, r.size, 0), Contains(VocabularyCut{r.multiple, r.tp, r.padded}));
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].id, "vocabulary-shard");
    EXPECT_TRUE(audit_vocabulary({{"embed", r.saved_after, 2}}, context(r.size)).empty());
  }
}

TEST(Vocabulary, ListsExactlyTheCutsThatBruteForceFinds) {
  for (const Row& r : kTable) {
    if (r.saved_before == r.size) continue;
    std::vector<VocabularyCut> expected;
    for (const Index m : {1, 8, 16, 32, 64, 128, 256})
      for (Index t = 2; t <= 40; ++t) {
        Index p = r.size;
        while (p % (m * t) != 0) ++p;
        if (p != r.size && p / t == r.saved_before && p % t == 0) expected.push_back({m, t, p});
      }
    auto got = explain_shard(r.saved_before, r.size, 0);
    std::erase_if(got, [](const VocabularyCut& c) { return c.tp > 40; });
    EXPECT_TRUE(std::is_permutation(got.begin(), got.end(), expected.begin(), expected.end())) << r.size << "/" << r.tp;
  }
}

TEST(Vocabulary, NamesTheLikeliestFirstAndAllThatFit) {
  EXPECT_EQ(explain_shard(16064, 128256, 64), (std::vector<VocabularyCut>{{64, 8, 128512}}));
  const auto cuts = explain_shard(128, 1000, 0);
  EXPECT_EQ(cuts.front(), (VocabularyCut{64, 8, 1024}));
  EXPECT_THAT(cuts, Contains(VocabularyCut{64, 15, 1920}));
  for (const VocabularyCut& c : explain_shard(128, 1000, 8)) EXPECT_EQ(8 % c.tp, 0) << "ranks divide the heads";
}

TEST(Vocabulary, TellsAnExactPartFromAPaddedOne) {
  const auto cuts = explain_shard(8000, 32000, 32);
  ASSERT_EQ(cuts.size(), 1u);
  EXPECT_EQ(cuts[0], (VocabularyCut{1, 4, 32000}));
}

TEST(Vocabulary, SaysWhatIsLostAndHowToAvoidIt) {
  const auto findings =
      audit_vocabulary({{"model.embed_tokens.weight", 16064, 16384}}, {"config.json", 128256, 64, true});
  ASSERT_EQ(findings.size(), 1u);
  const Finding& f = findings[0];
  EXPECT_EQ(f.severity, Severity::kError);
  EXPECT_EQ(f.what, "16,064 rows; config.json expects vocab_size = 128,256");
  EXPECT_THAT(f.why, Contains(HasSubstr("16,064 = 128,512 / 8, and 128,512 = 64 x 8 x 251")));
  EXPECT_THAT(f.why, Contains(HasSubstr("optimizer/ is missing, which is consistent")));
  EXPECT_EQ(f.lost, "Rows 16,064 to 128,255 (112,192 rows, 1.84 GB) are missing from this checkpoint.");
  EXPECT_THAT(f.advice, HasSubstr("make_vocab_size_divisible_by=32 (32 x 8 = 256 divides 128,256"));
}

TEST(Vocabulary, ExplainsPaddingThatWasNotCutBack) {
  const auto findings = audit_vocabulary({{"embed", 32256, 8192}, {"head", 32000, 8192}}, context(32000));
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].id, "vocabulary-padded");
  EXPECT_THAT(findings[0].tensors, testing::ElementsAre("embed"));
  EXPECT_THAT(findings[0].why, Contains(HasSubstr("32,256 = 64 x 8 x 63")));
  EXPECT_THAT(findings[0].why, Contains(HasSubstr("head has 32,000, so the two differ")));
}

TEST(Vocabulary, AdmitsWhatItCannotExplain) {
  const auto fewer = audit_vocabulary({{"embed", 17, 2}}, context(32000));
  ASSERT_EQ(fewer.size(), 1u);
  EXPECT_EQ(fewer[0].id, "vocabulary-rows");
  const auto more = audit_vocabulary({{"embed", 32003, 2}}, context(32000));
  ASSERT_EQ(more.size(), 1u);
  EXPECT_THAT(more[0].advice, HasSubstr("resize_token_embeddings"));
}

}  // namespace
}  // namespace reshard::vocabulary_test
