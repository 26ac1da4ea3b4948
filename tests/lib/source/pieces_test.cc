#include "lib/source/pieces.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <span>

#include "lib/source/piece_rows.h"
#include "tests/support/layouts.h"

namespace reshard::pieces_test {
namespace {

// Returns random fragments of a tensor, stored as formats and families store them: row-major, transposed, with every
// second row (a rotary permutation), or with gaps. Each has its own extent; some follow each other in a file.
FragmentList random_fragments(Rng& rng, const Dims& shape, Index element_bytes) {
  FragmentList out(shape.rank());
  const Mesh mesh = random_mesh(rng);
  const Placement placement = random_placement(rng, mesh, shape);
  Index at = 0;
  for (Index rank = 0; rank < mesh.ranks(); ++rank) {
    const auto box = owned(mesh, placement, shape, rank);
    if (!box || !is_first_replica(mesh, placement, rank)) continue;
    Fragment f;
    f.box = *box;
    f.strides = row_major_strides(box->shape);
    const int last = shape.rank() - 1;
    if (const Index how = below(rng, 4); shape.rank() > 0 && how == 1) {
      for (int d = 0; d < shape.rank(); ++d) f.strides[d] *= 2;
    } else if (shape.rank() > 1 && how == 2) {
      std::swap(f.box.shape[0], f.box.shape[last]);  // the strides of the transposed shape, exchanged
      f.strides = row_major_strides(f.box.shape);
      std::swap(f.strides[0], f.strides[last]);
      f.box.shape = box->shape;
    } else if (shape.rank() > 1 && how == 3) {
      f.strides[0] += below(rng, 20);
    }
    f.start = below(rng, 3) * element_bytes;
    Index reach = 1;
    for (int d = 0; d < shape.rank(); ++d) reach += std::max<Index>(0, box->shape[d] - 1) * f.strides[d];
    f.extent = {static_cast<std::uint32_t>(below(rng, 2)), at, f.start + reach * element_bytes};
    at += f.extent.length + below(rng, 2) * 64;
    out.add(f);
  }
  return out;
}

// Returns the byte offset from the extent's beginning.
Index address(const Fragment& f, const Dims& at, Index element_bytes) {
  Index elements = 0;
  for (int d = 0; d < at.rank(); ++d) elements += (at[d] - f.box.origin[d]) * f.strides[d];
  return f.start + elements * element_bytes;
}

template <class Visit>
void each_element(const Box& box, Visit visit) {
  Dims at = box.origin;
  for (Index n = volume(box); n > 0; --n) {
    visit(at);
    for (int d = box.rank() - 1; d >= 0 && ++at[d] == box.end(d); --d) at[d] = box.begin(d);
  }
}

void check_group(const FragmentList& list, const PieceGroup& group, Index element_bytes, Index max_span,
                 std::set<std::vector<Index>>& seen) {
  ASSERT_LE(group.length(), std::max(max_span, element_bytes));
  Index begin = group.end, end = group.begin;
  for (const Piece& p : group.pieces) {
    const Fragment f = list.get(p.fragment);
    ASSERT_EQ(p.extent, group.extent);
    ASSERT_EQ(p.extent, f.extent);
    ASSERT_EQ(p.strides, f.strides);
    Index first = p.end, last = p.begin;
    each_element(p.box, [&](const Dims& at) {
      const Index byte = address(f, at, element_bytes);
      first = std::min(first, byte);
      last = std::max(last, byte + element_bytes);
      EXPECT_TRUE(seen.insert({at.begin(), at.end()}).second) << to_string(at) << " is in two pieces";
    });
    ASSERT_EQ(first, p.begin);
    ASSERT_EQ(last, p.end);
    begin = std::min(begin, p.begin);
    end = std::max(end, p.end);
  }
  ASSERT_EQ(begin, group.begin);
  ASSERT_EQ(end, group.end);
}

// Checks that each element of `rows` is where its group is, if the bytes of `groups` are in memory one after the other.
void check_rows(const FragmentList& list, std::span<const PieceGroup> groups, const Piece& rows, Index element_bytes) {
  const Fragment f = list.get(rows.fragment);
  Index held = 0;
  for (const PieceGroup& group : groups) {
    const Index behind = (&group - groups.data()) * groups[0].length() - group.begin;
    const Piece& piece = group.pieces.at(0);
    held += volume(piece.box);
    each_element(piece.box, [&](const Dims& at) {
      const Box element{at, Dims::filled(at.rank(), 1)};
      ASSERT_EQ(intersect(rows.box, element), element);
      ASSERT_EQ(offset_in(rows.box, rows.strides, element) * element_bytes, behind + address(f, at, element_bytes));
    });
  }
  ASSERT_EQ(volume(rows.box), held);
}

TEST(Pieces, RowsThatAreCopiedTogetherKeepTheirElements) {
  Rng rng(43);
  std::size_t together = 0;
  for (int n = 0; n < 400; ++n) {
    const Dims shape = random_shape(rng);
    const Index element_bytes = Index{1} << below(rng, 5), room = below(rng, 4000);
    const FragmentList list = random_fragments(rng, shape, element_bytes);
    const FragmentIndex index(list);
    Box box = random_box(rng, shape);
    while (volume(box) > 2000) *std::max_element(&box.shape[0], &box.shape[0] + box.rank()) /= 2;
    const auto groups = pieces_of(list, index, box, element_bytes, 16 + below(rng, 200));
    for (std::size_t i = 0, count = 0; i < groups.size(); i += count) {
      Piece rows = groups[i].pieces.front();
      count = take_rows(std::span(groups).subspan(i), element_bytes, room, rows);
      ASSERT_GE(count, 1);
      ASSERT_LE(i + count, groups.size());
      if (count == 1) continue;
      together += count;
      ASSERT_LE(static_cast<Index>(count) * groups[i].length(), room);
      ASSERT_NO_FATAL_FAILURE(check_rows(list, std::span(groups).subspan(i, count), rows, element_bytes));
    }
  }
  EXPECT_GT(together, 1000);
}

TEST(Pieces, HoldEveryElementOnceWithinTheSpan) {
  Rng rng(41);
  for (int n = 0; n < 400; ++n) {
    const Dims shape = random_shape(rng);
    const Index element_bytes = Index{1} << below(rng, 5);
    const FragmentList list = random_fragments(rng, shape, element_bytes);
    const FragmentIndex index(list);
    Box box = random_box(rng, shape);
    while (volume(box) > 2000) *std::max_element(&box.shape[0], &box.shape[0] + box.rank()) /= 2;
    const Index max_span = 16 + below(rng, 2000);
    // A fragment on another stage leaves elements without an owner.
    Index held = 0;
    index.overlapping(box, [&](std::size_t, const Box& both) { held += volume(both); });
    std::set<std::vector<Index>> seen;
    const auto groups = pieces_of(list, index, box, element_bytes, max_span);
    for (std::size_t i = 0; i < groups.size(); ++i) {
      ASSERT_NO_FATAL_FAILURE(check_group(list, groups[i], element_bytes, max_span, seen)) << to_string(shape);
      if (i == 0) continue;
      const PieceGroup &a = groups[i - 1], &b = groups[i];
      ASSERT_TRUE(std::tie(a.extent.file, a.extent.offset, a.begin) <=
                  std::tie(b.extent.file, b.extent.offset, b.begin));
    }
    ASSERT_EQ(static_cast<Index>(seen.size()), held);
  }
}

TEST(Pieces, BetweenBytesHoldEveryElementOnceInOneInterval) {
  Rng rng(43);
  for (int n = 0; n < 200; ++n) {
    const Dims shape = random_shape(rng);
    const Index element_bytes = Index{1} << below(rng, 5);
    const FragmentList list = random_fragments(rng, shape, element_bytes);
    for (std::size_t i = 0; i < list.size(); ++i) {
      const Fragment f = list.get(i);
      if (volume(f.box) > 2000) continue;
      const Index step = (1 + below(rng, 50)) * element_bytes;
      std::set<std::vector<Index>> seen;
      for (Index begin = 0; begin < f.extent.length; begin += step)
        for (const Piece& p : pieces_between(list, i, element_bytes, begin, begin + step)) {
          ASSERT_EQ(p.fragment, i);
          ASSERT_EQ(p.extent, f.extent);
          ASSERT_GE(p.begin, begin);
          ASSERT_LE(p.end, begin + step);
          ASSERT_EQ(p.begin, address(f, p.box.origin, element_bytes));
          each_element(p.box, [&](const Dims& at) {
            EXPECT_TRUE(seen.insert({at.begin(), at.end()}).second) << to_string(at) << " is in two pieces";
          });
        }
      ASSERT_EQ(std::ssize(seen), volume(f.box));
    }
  }
}

TEST(Pieces, BetweenBytesAreFewBoxes) {
  FragmentList list(3);
  Fragment f;
  f.box = whole({10, 20, 30});
  f.strides = row_major_strides(f.box.shape);
  f.extent = {0, 0, 6000};
  list.add(f);
  EXPECT_EQ(pieces_between(list, 0, 1, 0, 6000).size(), 1u);
  EXPECT_EQ(pieces_between(list, 0, 1, 600, 1800).size(), 1u);  // whole matrices
  EXPECT_EQ(pieces_between(list, 0, 1, 617, 4333).size(), 5u);  // 2 rank - 1
  EXPECT_EQ(pieces_between(list, 0, 1, 617, 618).size(), 1u);
}

TEST(Pieces, ThatTouchAreOneGroup) {
  // Two halves of the rows, interleaved, form one run.
  FragmentList list(2);
  Fragment f;
  f.extent = {0, 0, 64};
  f.box = {{0, 0}, {4, 2}};
  f.strides = {4, 1};
  list.add(f);
  f.box = {{4, 0}, {4, 2}};
  f.start = 8;
  list.add(f);
  const auto groups = pieces_of(list, FragmentIndex(list), {{0, 0}, {8, 2}}, 4, 1 << 20);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].pieces.size(), 2u);
  EXPECT_EQ(groups[0].length(), 64);
}

TEST(Pieces, WithLongRunsFarApartAreNotReadThrough) {
  // Rows of 32 KiB, 1 MiB apart.
  FragmentList list(2);
  Fragment f;
  f.extent = {0, 0, 8 << 20};
  f.box = {{0, 0}, {8, 32 << 10}};
  f.strides = {1 << 20, 1};
  list.add(f);
  EXPECT_EQ(pieces_of(list, FragmentIndex(list), f.box, 1, 16 << 20).size(), 8u);
}

TEST(IsOneRun, LooksPastDimensionsOfOne) {
  EXPECT_TRUE(is_one_run(Dims{}, {}));
  EXPECT_TRUE(is_one_run(Dims{3, 4}, {4, 1}));
  EXPECT_TRUE(is_one_run(Dims{1, 4}, {99, 1}));
  EXPECT_TRUE(is_one_run(Dims{3, 1, 4}, {4, 77, 1}));
  EXPECT_FALSE(is_one_run(Dims{3, 4}, {5, 1}));
  EXPECT_FALSE(is_one_run(Dims{3, 4}, {1, 3}));
  EXPECT_FALSE(is_one_run(Dims{4}, {2}));
}

}  // namespace
}  // namespace reshard::pieces_test
