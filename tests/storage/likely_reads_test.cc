// Tests which reads are guessed from those before.
#include "lib/base/storage/likely_reads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reshard::likely_reads_test {
namespace {

LikelyReads::Range read_of(const std::string& key, Index size, Index offset, Index length) {
  return {{key, size}, offset, length};
}

std::vector<std::string> told(const std::vector<LikelyReads::Range>& ranges) {
  std::vector<std::string> out;
  for (const auto& [object, offset, length] : ranges)
    out.push_back(object.key + " " + std::to_string(offset) + "+" + std::to_string(length));
  return out;
}

TEST(LikelyReads, AreTheSmallObjectsAroundASmallOne) {
  LikelyReads likely;
  likely.set_objects(
      {{"a/one", 10}, {"a/b/two", 20}, {"a/large", 1 << 20}, {"a/empty", 0}, {"c/three", 30}, {"root", 5}});
  EXPECT_THAT(told(likely.after(read_of("a/one", 10, 0, 10))), testing::ElementsAre("a/b/two 0+20"));
  EXPECT_THAT(told(likely.after(read_of("a/one", 10, 0, 10))), testing::IsEmpty()) << "each once";
  EXPECT_THAT(told(likely.after(read_of("root", 5, 0, 5))), testing::IsEmpty()) << "not a whole bucket";
  EXPECT_THAT(told(likely.after(read_of("unlisted/x", 5, 0, 5))), testing::IsEmpty());
}

TEST(LikelyReads, AreTheSamePartsOfTheNextFilesInARow) {
  constexpr Index kSize = 1 << 20, kStart = LikelyReads::kSmallObject;
  std::vector<LikelyReads::Object> objects;
  for (int i = 0; i < 40; ++i) objects.push_back({"d/rank_" + std::to_string(i) + "/x.pt", kSize + (i == 3 ? 64 : 0)});
  LikelyReads likely;
  likely.set_objects(objects);
  const auto after = [&](int i, Index offset, Index length) {
    return told(likely.after(read_of(objects[i].key, objects[i].size, offset, length)));
  };
  for (const auto& [offset, length] : {std::pair<Index, Index>(0, 520), {kSize - 4096, 4096}, {200'000, 30}})
    EXPECT_THAT(after(0, offset, length), testing::IsEmpty()) << "one file is no row";
  EXPECT_THAT(after(1, 0, 520),
              testing::ElementsAre("d/rank_1/x.pt 1044480+4096", "d/rank_1/x.pt 200000+4096",  // the rest of this one
                                   "d/rank_2/x.pt 0+" + std::to_string(kStart), "d/rank_2/x.pt 1044480+4096",
                                   "d/rank_2/x.pt 200000+4096", "d/rank_3/x.pt 0+" + std::to_string(kStart),
                                   "d/rank_3/x.pt 1044544+4096"));  // of another size: nothing inside, and its own end
  EXPECT_THAT(after(1, kSize - 4096, 4096), testing::IsEmpty());
  EXPECT_EQ(after(4, 0, 520).size(), 2U + 3 * 4) << "twice as many files at a time";
}

}  // namespace
}  // namespace reshard::likely_reads_test
