#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "lib/checkpoint/catalog.h"
#include "tests/support/soak.h"

namespace reshard::validate_test {
namespace {

Tensor tensor_of(const Dims& shape, const std::vector<Box>& boxes, const std::string& name = "w") {
  Tensor t;
  t.name = name;
  t.shape = shape;
  t.fragments = FragmentList(shape.rank());
  t.replicas = FragmentList(shape.rank());
  for (const Box& box : boxes) {
    Fragment f;
    f.box = box;
    f.strides = row_major_strides(box.shape);
    t.fragments.add(f);
  }
  return t;
}

std::string cover_message(const Dims& shape, const std::vector<Box>& boxes) {
  const Status s = check_cover(tensor_of(shape, boxes));
  if (s) return "fine";
  EXPECT_EQ(s.error().code(), ErrorCode::kCorrupt);
  return s.error().message();
}

Blob blob(const std::string& name, const Extent& extent) {
  Blob b;
  b.name = name;
  b.extent = extent;
  return b;
}

// ---- check_cover: messages

TEST(CheckCover, AcceptsShardsGridsAndScalars) {
  EXPECT_EQ(cover_message({4, 2}, {{{0, 0}, {4, 2}}}), "fine");
  EXPECT_EQ(cover_message({5}, {{{4}, {1}}, {{0}, {2}}, {{2}, {2}}}), "fine");
  EXPECT_EQ(cover_message({4, 4}, {{{0, 0}, {2, 2}}, {{0, 2}, {2, 2}}, {{2, 0}, {2, 2}}, {{2, 2}, {2, 2}}}), "fine");
  EXPECT_EQ(cover_message({}, {Box{}}), "fine");
}

TEST(CheckCover, EmptyBoxesOverlapNothing) {
  EXPECT_EQ(cover_message({5, 2}, {{{0, 0}, {5, 2}}, {{5, 0}, {0, 2}}, {{3, 0}, {0, 2}}}), "fine");
  EXPECT_EQ(cover_message({0, 4}, {{{0, 0}, {0, 4}}}), "fine");
  EXPECT_EQ(cover_message({0, 4}, {}), "fine");
}

TEST(CheckCover, NamesTheFirstHole) {
  EXPECT_EQ(cover_message({10, 2}, {{{0, 0}, {4, 2}}, {{6, 0}, {4, 2}}}),
            "tensor 'w' [10, 2]: 4 of 20 elements are missing, the first in [4:6, 0:2]");
  EXPECT_EQ(cover_message({10, 2}, {}), "tensor 'w' [10, 2]: 20 of 20 elements are missing, the first in [0:10, 0:2]");
  EXPECT_EQ(cover_message({128256, 2}, {{{0, 0}, {16064, 2}}}),
            "tensor 'w' [128256, 2]: 224,384 of 256,512 elements are missing, the first in "
            "[16064:128256, 0:2]");
  EXPECT_EQ(cover_message({}, {}), "tensor 'w': expected one stored value, got 0");
}

TEST(CheckCover, NamesTwoBoxesThatOverlap) {
  EXPECT_EQ(cover_message({10, 2}, {{{0, 0}, {6, 2}}, {{5, 0}, {5, 2}}}),
            "tensor 'w' [0:6, 0:2] overlaps [5:10, 0:2]: every element must be stored once");
  EXPECT_EQ(cover_message({}, {Box{}, Box{}}), "tensor 'w': expected one stored value, got 2");
}

TEST(CheckCover, NamesABoxOutsideTheTensor) {
  EXPECT_EQ(cover_message({10, 2}, {{{8, 0}, {4, 2}}}),
            "tensor 'w': box of shape [4, 2] at [8, 0] is outside the tensor's shape [10, 2]");
  EXPECT_EQ(cover_message({10}, {{{-1}, {2}}}),
            "tensor 'w': box of shape [2] at [-1] is outside the tensor's shape [10]");
  EXPECT_EQ(cover_message({10}, {{{5}, {-2}}}),
            "tensor 'w': box of shape [-2] at [5] is outside the tensor's shape [10]");
  EXPECT_EQ(cover_message({10}, {{{11}, {0}}}),
            "tensor 'w': box of shape [0] at [11] is outside the tensor's shape [10]");
}

TEST(CheckCover, ABoxWhoseEndOverflowsIsOutside) {
  EXPECT_EQ(cover_message({10}, {{{0}, {10}}, {{INT64_MAX}, {INT64_MAX}}}),
            "tensor 'w': box of shape [9223372036854775807] at [9223372036854775807] is outside the tensor's shape "
            "[10]");
}

TEST(CheckCover, ARepeatedWholeCannotWrapItsVolume) {
  const Box half{{0}, {INT64_MAX}};
  EXPECT_EQ(cover_message({INT64_MAX}, {half, half}),
            "tensor 'w' [0:9223372036854775807]: the boxes' volumes overflow");
}

// ---- check_cover against counting every element

bool covers_once(const Dims& shape, const std::vector<Box>& boxes) {
  std::vector<int> count(static_cast<std::size_t>(volume(shape)));
  const Dims strides = row_major_strides(shape);
  for (const Box& box : boxes) {
    if (!contains(whole(shape), box)) return false;
    for (Index n = 0; n < volume(box); ++n) {
      Index rest = n, at = 0;
      for (int d = shape.rank() - 1; d >= 0; --d) {
        at += (box.origin[d] + rest % box.shape[d]) * strides[d];
        rest /= box.shape[d];
      }
      ++count[static_cast<std::size_t>(at)];
    }
  }
  return std::all_of(count.begin(), count.end(), [](int n) { return n == 1; });
}

// Cuts `box` in two at random, again and again. The result is a tiling that usually forms no grid.
void tile(const Box& box, std::mt19937& rng, int depth, std::vector<Box>& out) {
  const int d = static_cast<int>(rng() % static_cast<unsigned>(box.rank()));
  if (depth == 0 || box.shape[d] < 2 || rng() % 5 == 0) {
    out.push_back(box);
    return;
  }
  const Index at = 1 + static_cast<Index>(rng() % static_cast<unsigned>(box.shape[d] - 1));
  Box low = box, high = box;
  low.shape[d] = at;
  high.origin[d] += at;
  high.shape[d] -= at;
  tile(low, rng, depth - 1, out);
  tile(high, rng, depth - 1, out);
}

std::vector<Box> grid(const Dims& shape, std::mt19937& rng) {
  std::vector<Box> out = {whole(shape)};
  for (int d = 0; d < shape.rank(); ++d) {
    const Index piece = 1 + static_cast<Index>(rng() % static_cast<unsigned>(shape[d]));
    std::vector<Box> next;
    for (const Box& box : out)
      for (Index at = 0; at < shape[d]; at += piece) {
        next.push_back(box);
        next.back().origin[d] = at;
        next.back().shape[d] = std::min(piece, shape[d] - at);
      }
    out = std::move(next);
  }
  return out;
}

TEST(CheckCover, AgreesWithCountingEveryElement) {
  std::mt19937 rng(11);
  int fine = 0, holes = 0, overlaps = 0;
  for (int i = 0; i < 10'000; ++i) {
    const int rank = 1 + static_cast<int>(rng() % 3);
    Dims shape;
    for (int d = 0; d < rank; ++d)
      shape.push_back(1 + static_cast<Index>(rng() % (rank == 1 ? 60 : rank == 2 ? 14 : 7)));
    std::vector<Box> boxes;
    if (rng() % 2) {
      boxes = grid(shape, rng);
    } else {
      tile(whole(shape), rng, 7, boxes);
    }
    std::shuffle(boxes.begin(), boxes.end(), rng);
    Box& victim = boxes[rng() % boxes.size()];
    const int d = static_cast<int>(rng() % static_cast<unsigned>(rank));
    switch (rng() % 6) {
      case 0:
        boxes.erase(boxes.begin() + (&victim - boxes.data()));
        break;
      case 1:
        boxes.push_back(Box(victim));
        break;
      case 2:
        victim.origin[d] += rng() % 2 ? 1 : -1;
        break;
      case 3:
        victim.shape[d] += rng() % 2 ? 1 : -1;
        break;
      default:
        break;
    }
    const Status s = check_cover(tensor_of(shape, boxes));
    ASSERT_EQ(s.has_value(), covers_once(shape, boxes)) << (s ? "accepted" : s.error().message());
    fine += s.has_value();
    if (s) continue;
    holes += s.error().message().find(" missing") != std::string::npos;
    overlaps += s.error().message().find("overlaps") != std::string::npos;
  }
  EXPECT_GT(fine, 2000);
  EXPECT_GT(holes, 1000);
  EXPECT_GT(overlaps, 1000);
}

TEST(CheckCover, ThousandsOfBoxesThatFormNoGrid) {
  // Each row of bricks is cut elsewhere, so the grid of all edges has far more cells than there are bricks.
  constexpr Index kRows = 300, kWidth = 3000;
  std::vector<Box> bricks;
  for (Index r = 0; r < kRows; ++r) {
    Index at = 0;
    for (Index cut = 1 + r; cut < kWidth; cut += kRows) {
      bricks.push_back({{r, at}, {1, cut - at}});
      at = cut;
    }
    bricks.push_back({{r, at}, {1, kWidth - at}});
  }
  EXPECT_EQ(cover_message({kRows, kWidth}, bricks), "fine");
  std::vector<Box> shifted = bricks;
  shifted[1001].shape[1] += 1;
  EXPECT_NE(cover_message({kRows, kWidth}, shifted).find(" overlaps "), std::string::npos);
  bricks.erase(bricks.begin() + 1001);
  EXPECT_EQ(cover_message({kRows, kWidth}, bricks), "tensor 'w' [300, 3000]: 92 of 900,000 elements are missing");
}

TEST(CheckCover, AGridOfAMillionBoxes) {
  const Index side = 1000 / every_nth(3);
  Tensor t = tensor_of({side * 2, side * 3}, {});
  t.fragments.reserve(static_cast<std::size_t>(side * side));
  Fragment f;
  f.box.shape = {2, 3};
  f.strides = {3, 1};
  for (Index i = 0; i < side; ++i)
    for (Index j = 0; j < side; ++j) {
      f.box.origin = {2 * i, 3 * j};
      t.fragments.add(f);
    }
  EXPECT_TRUE(check_cover(t));
}

// ---- validate

// Returns a catalog with one float32 tensor [4, 2] in two halves of one file.
Catalog two_halves() {
  Catalog c;
  c.root = "ckpt";
  c.files = {{"__0_0.distcp", 1000}};
  Tensor t = tensor_of({4, 2}, {{{0, 0}, {2, 2}}, {{2, 0}, {2, 2}}});
  for (std::size_t i = 0; i < 2; ++i) {
    Fragment f = t.fragments.get(i);
    f.extent = {0, 64 + 64 * static_cast<Index>(i), 16};
    t.fragments.set(i, f);
  }
  EXPECT_TRUE(c.add(std::move(t)));
  return c;
}

void change(Catalog& c, std::size_t i, const std::function<void(Fragment&)>& edit) {
  Fragment f = c.tensor(0).fragments.get(i);
  edit(f);
  c.tensor(0).fragments.set(i, f);
}

std::string validate_message(const Catalog& c, bool files_too = true) {
  const Status s = validate(c, files_too);
  return s ? "fine" : s.error().message();
}

TEST(Validate, AcceptsASoundCatalog) { EXPECT_EQ(validate_message(two_halves()), "fine"); }

TEST(Validate, NamesTheCheckpointBeforeTheTensor) {
  Catalog c = two_halves();
  change(c, 1, [](Fragment& f) { f.box.origin = {1, 0}; });
  EXPECT_EQ(validate_message(c), "ckpt: tensor 'w' [0:2, 0:2] overlaps [1:3, 0:2]: every element must be stored once");
}

TEST(Validate, NamesAFileThatIsMissing) {
  Catalog c = two_halves();
  c.files[0].size = -1;
  const Status s = validate(c);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code(), ErrorCode::kIo);
  EXPECT_EQ(s.error().message(), "ckpt/__0_0.distcp: file is missing; it contains tensor 'w' [0:2, 0:2]");
  EXPECT_EQ(validate_message(c, false), "fine") << "metadata alone";
}

TEST(Validate, NamesAFileThatIsCutShort) {
  Catalog c = two_halves();
  c.files[0].size = 143;
  EXPECT_EQ(validate_message(c),
            "ckpt/__0_0.distcp@0x80: tensor 'w' [2:4, 0:2]: data ends at byte 144, but the file has 143 bytes: it is "
            "truncated or belongs to another save");
  change(c, 1, [](Fragment& f) { f.extent.offset = INT64_MAX - 3; });
  EXPECT_EQ(validate_message(c),
            "ckpt/__0_0.distcp@0x7ffffffffffffffc: tensor 'w' [2:4, 0:2]: data ends at byte 2^63, but the file has "
            "143 bytes: it is truncated or belongs to another save");
}

TEST(Validate, ChecksTheFilesOfObjectsToo) {
  Catalog c = two_halves();
  c.blobs.push_back(blob("train_state.step", {0, 990, 20}));
  EXPECT_EQ(validate_message(c),
            "ckpt/__0_0.distcp@0x3de: object 'train_state.step': data ends at byte 1,010, but the file has 1,000 "
            "bytes: it is truncated or belongs to another save");
}

TEST(Validate, StridesMustStayInsideTheExtent) {
  Catalog c = two_halves();
  change(c, 0, [](Fragment& f) { f.strides = {1, 2}; });
  EXPECT_EQ(validate_message(c), "fine") << "transposed";
  change(c, 0, [](Fragment& f) { f.strides = {3, 1}; });
  EXPECT_EQ(validate_message(c),
            "ckpt/__0_0.distcp@0x40: tensor 'w' [0:2, 0:2]: strides [3, 1] reach past the 16 stored bytes");
  change(c, 0, [](Fragment& f) { f.strides = {2, 1}, f.start = 4; });
  EXPECT_FALSE(validate(c));
  change(c, 0, [](Fragment& f) { f.start = -4; });
  EXPECT_FALSE(validate(c));
}

TEST(Validate, StridesOutOfRangeAreRefused) {
  Catalog c = two_halves();
  change(c, 0, [](Fragment& f) { f.strides = {-2, 1}; });
  EXPECT_EQ(validate_message(c), "tensor 'w' [0:2, 0:2]: strides [-2, 1] are out of range");
  change(c, 0, [](Fragment& f) { f.strides = {INT64_MAX, 1}; });
  EXPECT_EQ(validate_message(c), "tensor 'w' [0:2, 0:2]: strides [9223372036854775807, 1] are out of range");
  change(c, 0, [](Fragment& f) { f.strides = {INT64_MAX - 1, 1}; });
  EXPECT_NE(validate_message(c), "fine");
}

TEST(Validate, ItemsThatAreNotLocatedYetHaveNoStrides) {
  Catalog c = two_halves();
  change(c, 0, [](Fragment& f) { f.extent.length = 3; });
  EXPECT_NE(validate_message(c), "fine");
  c.tensor(0).located = false;
  EXPECT_EQ(validate_message(c), "fine");
}

TEST(Validate, AReplicaRepeatsABoxOfTheCover) {
  Catalog c = two_halves();
  Fragment copy = c.tensor(0).fragments.get(1);
  c.tensor(0).replicas.add(copy);
  EXPECT_EQ(validate_message(c), "fine");
  copy.box.origin = {1, 0};
  c.tensor(0).replicas.set(0, copy);
  EXPECT_EQ(validate_message(c),
            "ckpt: tensor 'w' [1:3, 0:2]: expected a replica of a stored box, got a box that no fragment has");
}

// ---- check_extents_disjoint

TEST(ExtentsDisjoint, TwoItemsMustNotClaimTheSameBytes) {
  Catalog c = two_halves();
  EXPECT_TRUE(check_extents_disjoint(c, SharedExtents::kTies));
  change(c, 1, [](Fragment& f) { f.extent.offset = 79; });
  const Status s = check_extents_disjoint(c, SharedExtents::kTies);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().message(),
            "ckpt/__0_0.distcp@0x4f: tensor 'w' [0:2, 0:2] and tensor 'w' [2:4, 0:2] claim the same bytes");
  change(c, 1, [](Fragment& f) { f.extent.offset = 64; });
  EXPECT_FALSE(check_extents_disjoint(c, SharedExtents::kTies)) << "two boxes of one tensor at one place";
}

TEST(ExtentsDisjoint, AnObjectCountsToo) {
  Catalog c = two_halves();
  c.blobs.push_back(blob("step", {0, 70, 4}));
  EXPECT_EQ(check_extents_disjoint(c, SharedExtents::kTies).error().message(),
            "ckpt/__0_0.distcp@0x46: tensor 'w' [0:2, 0:2] and object 'step' claim the same bytes");
}

TEST(ExtentsDisjoint, TiedTensorsShareAnExtentExactlyWhereTiesAreAllowed) {
  Catalog c = two_halves();
  Tensor tied = c.tensors()[0];
  tied.name = "output.weight";
  ASSERT_TRUE(c.add(tied));
  EXPECT_TRUE(check_extents_disjoint(c, SharedExtents::kTies));
  EXPECT_FALSE(check_extents_disjoint(c, SharedExtents::kRefused));
}

}  // namespace
}  // namespace reshard::validate_test
