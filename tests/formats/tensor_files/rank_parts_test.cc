#include "formats/tensor_files/rank_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/tensor_files/joined_tensor.h"

namespace reshard::rank_parts_test {
namespace {

Fragment stored(const Dims& shape, std::uint32_t file) {
  Fragment out;
  out.box = whole(shape);
  out.strides = row_major_strides(shape);
  out.extent = {file, 0, volume(shape) * 4};
  return out;
}

TEST(RankParts, GroupByNameAndFindByRank) {
  RankParts parts;
  EXPECT_TRUE(parts.add("b", 0, stored({2}, 0), DType::kFloat32));
  EXPECT_TRUE(parts.add("a", 0, stored({3}, 0), DType::kFloat32));
  EXPECT_TRUE(parts.add("b", 2, stored({4}, 2), DType::kFloat32));
  EXPECT_FALSE(parts.add("b", 2, stored({5}, 3), DType::kFloat32)) << "a second part of one rank";
  ASSERT_EQ(parts.all().size(), 2u);
  EXPECT_EQ(parts.all()[0].name, "b") << "in the order in which they came";
  const RankParts::Parts* const b = parts.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->first().rank, 0);
  EXPECT_EQ(b->of(1), nullptr);
  ASSERT_NE(b->of(2), nullptr);
  EXPECT_EQ(b->of(2)->stored.shape(), Dims({4}));
  EXPECT_EQ(parts.find("c"), nullptr);
}

TEST(RankParts, AGapNamesTheFirstMissingRanks) {
  const auto message = [](const std::map<Index, std::string>& files) {
    const Status status = check_no_gap(files);
    return status ? std::string("complete") : status.error().message();
  };
  EXPECT_EQ(message({}), "complete");
  EXPECT_EQ(message({{0, "a"}, {1, "b"}}), "complete");
  EXPECT_EQ(message({{0, "a"}, {2, "b"}}), "the file of rank 1 is missing; got 2 files, of ranks up to 2");
  EXPECT_EQ(message({{9, "a"}}), "the files of ranks 0, 1, 2 are missing; got 1 file, of ranks up to 9");
}

TEST(JoinedTensor, EqualBoxesAreReplicas) {
  JoinedTensor joined("w", DType::kFloat32, {4});
  for (std::uint32_t file = 0; file < 4; ++file) joined.add({2}, {{{file / 2 * 2}, {2}}, {0}}, {file, 0, 8});
  EXPECT_EQ(joined.tensor.fragments.size(), 2u);
  EXPECT_EQ(joined.tensor.replicas.size(), 2u);
  EXPECT_TRUE(check_cover(joined.tensor));
  EXPECT_TRUE(joined.check_same_whole(DType::kFloat32, {4}));
  EXPECT_EQ(joined.check_same_whole(DType::kFloat16, {8}).error().message(),
            "expected a part of float32 [4] as in the files of other ranks, got one of float16 [8]");
}

TEST(JoinedTensor, EmptyPartsCountOnlyIfTheWholeIsEmpty) {
  JoinedTensor some("w", DType::kFloat32, {4});
  some.add({0}, {{{0}, {0}}, {0}}, {0, 0, 0});
  EXPECT_TRUE(some.tensor.fragments.empty());
  JoinedTensor none("w", DType::kFloat32, {4, 0});
  for (std::uint32_t file = 0; file < 3; ++file) none.add({2, 0}, {{{0, 0}, {2, 0}}, {0, 0}}, {file, 0, 0});
  ASSERT_EQ(none.tensor.fragments.size(), 1u);
  EXPECT_EQ(none.tensor.fragments.box(0), whole({4, 0}));
  EXPECT_EQ(none.tensor.replicas.size(), 2u) << "one of each further rank";
}

}  // namespace
}  // namespace reshard::rank_parts_test
