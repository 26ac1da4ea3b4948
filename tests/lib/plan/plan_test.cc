#include "lib/plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "tests/support/layouts.h"

namespace reshard::plan_test {
namespace {

Tensor tensor_of(const std::string& name, const Dims& shape, const std::vector<Box>& boxes,
                 DType dtype = DType::kFloat32) {
  Tensor t;
  t.name = name;
  t.dtype = dtype;
  t.shape = shape;
  t.fragments = FragmentList(shape.rank());
  for (const Box& box : boxes) {
    Fragment f;
    f.box = box;
    f.strides = row_major_strides(box.shape);
    t.fragments.add(f);
  }
  return t;
}

Catalog catalog_of(std::vector<Tensor> tensors) {
  Catalog out;
  for (Tensor& t : tensors) EXPECT_TRUE(out.add(std::move(t)));
  return out;
}

// Returns the boxes that the ranks of a mesh store.
std::vector<Box> stored_boxes(const Mesh& mesh, const Placement& placement, const Dims& shape) {
  std::vector<Box> out;
  for (Index rank = 0; rank < mesh.ranks(); ++rank)
    if (is_first_replica(mesh, placement, rank))
      if (const auto box = owned(mesh, placement, shape, rank)) out.push_back(*box);
  return out;
}

TEST(Plan, CountsMovesAndBytes) {
  const Catalog source =
      catalog_of({tensor_of("a", {8, 4}, {{{0, 0}, {4, 4}}, {{4, 0}, {4, 4}}}), tensor_of("b", {3}, {{{0}, {3}}})});
  const Catalog target = catalog_of({tensor_of("a", {8, 4}, {{{0, 0}, {8, 2}}, {{0, 2}, {8, 2}}}, DType::kBFloat16)});
  const auto plan = make_plan(source, target);
  ASSERT_TRUE(plan) << plan.error().message();
  EXPECT_EQ(plan->moves, 4);
  EXPECT_EQ(plan->bytes_read, 128);
  EXPECT_EQ(plan->bytes_written, 64);
  ASSERT_EQ(plan->tensors.size(), 1u);
  EXPECT_EQ(plan->tensors[0].from, 0u);
}

TEST(Plan, HoldsOnAnyTwoLayouts) {
  Rng rng(31);
  for (int n = 0; n < 500; ++n) {
    const Dims shape = random_shape(rng);
    const Mesh a = random_mesh(rng), b = random_mesh(rng);
    const auto from = stored_boxes(a, random_placement(rng, a, shape), shape);
    const auto to = stored_boxes(b, random_placement(rng, b, shape), shape);
    Index moves = 0;
    for (const Box& x : from)
      for (const Box& y : to) moves += !intersect(x, y).empty();
    const auto plan = make_plan(catalog_of({tensor_of("w", shape, from)}), catalog_of({tensor_of("w", shape, to)}));
    ASSERT_TRUE(plan) << plan.error().message();
    ASSERT_EQ(plan->moves, moves) << to_string(shape);
  }
}

TEST(Plan, NamesTheTensorThatCannotBeMade) {
  const Catalog source = catalog_of({tensor_of("w", {8}, {{{0}, {4}}, {{6}, {2}}})});
  const auto message = [&](Tensor wanted) {
    const auto plan = make_plan(source, catalog_of({std::move(wanted)}));
    return plan ? "fine" : plan.error().message();
  };
  EXPECT_EQ(message(tensor_of("v", {8}, {{{0}, {8}}})), "plan: no source for tensor 'v'");
  EXPECT_EQ(message(tensor_of("w", {9}, {{{0}, {9}}})), "tensor 'w': expected shape [9], got [8]");
  EXPECT_EQ(message(tensor_of("w", {8}, {{{0}, {8}}})),
            "plan: tensor 'w' [0:8]: expected 8 elements from the source, got 6");
}

// Counts the slabs that contain each element; expects one each.
void expect_exact_slabs(const Dims& shape, Index element_bytes, Index bytes, Index row_group) {
  const Slabs slabs(shape, element_bytes, bytes, row_group);
  std::vector<int> seen(static_cast<std::size_t>(volume(shape)));
  const Dims strides = row_major_strides(shape);
  Index next = 0, largest = 0;
  for (Index k = 0; k < slabs.count(); ++k) {
    const Box box = slabs.slab(k);
    ASSERT_TRUE(contains(whole(shape), box)) << to_string(box);
    ASSERT_FALSE(box.empty());
    largest = std::max(largest, volume(box) * element_bytes);
    Index first = 0;
    for (int d = 0; d < shape.rank(); ++d) first += box.origin[d] * strides[d];
    ASSERT_EQ(first, next) << "slabs follow each other in the row-major order";
    next += volume(box);
    if (row_group > 1) {
      ASSERT_EQ(box.begin(0) % row_group, 0);
      ASSERT_TRUE(box.end(0) % row_group == 0 || box.end(0) == shape[0]);
    }
  }
  ASSERT_EQ(next, volume(shape));
  ASSERT_EQ(largest, slabs.max_bytes());
  if (row_group == 1) {
    ASSERT_LE(largest, std::max(bytes, element_bytes));
  }
}

TEST(Slabs, AreConsecutiveAndNoLargerThanAskedFor) {
  Rng rng(32);
  for (int n = 0; n < 2000; ++n) {
    const Dims shape = random_shape(rng);
    ASSERT_NO_FATAL_FAILURE(expect_exact_slabs(shape, Index{1} << below(rng, 5), 1 + below(rng, 5000), 1))
        << to_string(shape);
  }
}

TEST(Slabs, CutBetweenRowGroups) {
  Rng rng(33);
  for (int n = 0; n < 500; ++n) {
    const Index group = 2 + below(rng, 16);
    const Dims shape = {group * (1 + below(rng, 20)), 1 + below(rng, 30)};
    ASSERT_NO_FATAL_FAILURE(expect_exact_slabs(shape, 2, 1 + below(rng, 3000), group)) << to_string(shape);
  }
}

TEST(Slabs, AreAsManyPagesEach) {
  // 1 MiB is 341 rows of 3,072 bytes. The 1,024 rows are three times that and one row.
  const Slabs slabs({2, 1024, 1536}, 2, 1 << 20, 1);
  EXPECT_EQ(slabs.count(), 8);
  EXPECT_EQ(slabs.slab(3).shape, (Dims{1, 256, 1536}));
  // Rows of 10 bytes fill pages 2048 at a time.
  EXPECT_EQ(Slabs({40'000, 5}, 2, 100'000, 1).slab(0).shape, (Dims{8192, 5}));
  EXPECT_EQ(Slabs({40'000, 5}, 2, 100'000, 3).slab(0).shape, (Dims{6144, 5}));
  EXPECT_EQ(Slabs({4099, 5}, 2, 10'000, 1).slab(0).shape, (Dims{820, 5})) << "no page fits";
}

// In every order of dimensions, slabs cover each element once and do not exceed the requested size.
TEST(Slabs, CoverATensorInAnyOrders) {
  Rng rng(34);
  for (int n = 0; n < 2000; ++n) {
    const Dims shape = random_shape(rng);
    Orders orders;
    std::vector<int> dims(static_cast<std::size_t>(shape.rank()));
    std::iota(dims.begin(), dims.end(), 0);
    for (DimOrder* const order : {&orders.written, &orders.read}) {
      std::shuffle(dims.begin(), dims.end(), rng);
      for (const int d : dims) order->push_back(d);
    }
    const Index element_bytes = Index{1} << below(rng, 5), bytes = 1 + below(rng, 5000);
    const Slabs slabs(shape, element_bytes, bytes, 1, orders);
    std::vector<int> seen(static_cast<std::size_t>(volume(shape)));
    const Dims strides = row_major_strides(shape);
    Index largest = 0;
    for (Index k = 0; k < slabs.count(); ++k) {
      const Box box = slabs.slab(k);
      ASSERT_TRUE(contains(whole(shape), box)) << to_string(box);
      largest = std::max(largest, volume(box) * element_bytes);
      for (Index i = 0; i < volume(box); ++i) {
        Index rest = i, at = 0;
        for (int d = shape.rank() - 1; d >= 0; rest /= box.shape[d--])
          at += (box.origin[d] + rest % box.shape[d]) * strides[d];
        ++seen[static_cast<std::size_t>(at)];
      }
    }
    ASSERT_TRUE(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; })) << to_string(shape);
    ASSERT_EQ(largest, slabs.max_bytes());
    ASSERT_LE(largest, std::max(bytes, element_bytes));
  }
}

TEST(Slabs, OfTransposedSidesHaveRunsOnBoth) {
  constexpr Index kBytes = Index{8} << 20;
  const Orders orders{{1, 0}, {0, 1}};
  EXPECT_TRUE(orders.are_transposed());
  EXPECT_EQ(Slabs({1600, 6400}, 2, kBytes, 1, orders).slab(1), (Box{{0, 2144}, {1600, 2144}}))
      << "written in one run, of whole pages, each about as long";
  EXPECT_EQ(Slabs({16384, 53248}, 2, kBytes, 1, orders).slab(1), (Box{{2048, 0}, {2048, 2048}}));
  EXPECT_EQ(Slabs({64, 16384, 53248}, 4, kBytes, 1, {{0, 2, 1}, {0, 1, 2}}).slab(0), (Box{{0, 0, 0}, {1, 1024, 2048}}));
  EXPECT_EQ(Slabs({8, 100, 300}, 2, kBytes, 1, {{0, 2, 1}, {0, 1, 2}}).count(), 1);
  // Both sides have the same order, which is not row-major.
  EXPECT_EQ(Slabs({16384, 53248}, 2, kBytes, 1, {{1, 0}, {1, 0}}).slab(1), (Box{{0, 256}, {16384, 256}}));
}

TEST(Slabs, TakeTheirOrdersFromHowFragmentsLie) {
  FragmentList rows(3), turned(3), narrow(3);
  Fragment f;
  f.box = whole({8, 64, 32});
  f.strides = {2048, 32, 1};
  rows.add(f);
  f.strides = {2048, 1, 64};
  turned.add(f);
  f.box = whole({1, 64, 1});
  f.strides = {7, 1, 0};
  narrow.add(f);
  EXPECT_EQ(orders_of(turned, rows).written, DimOrder({0, 2, 1}));
  EXPECT_EQ(orders_of(turned, rows).read, DimOrder({0, 1, 2}));
  EXPECT_TRUE(orders_of(turned, rows).are_transposed());
  EXPECT_FALSE(orders_of(rows, rows).are_transposed());
  EXPECT_FALSE(orders_of(narrow, rows).are_transposed()) << "nothing strides along what has one index";
  EXPECT_EQ(orders_of(FragmentList(3), rows).written.rank(), 0);
}

TEST(Slabs, OfAScalarAndOfNothing) {
  EXPECT_EQ(Slabs({}, 4, 1 << 20, 1).count(), 1);
  EXPECT_EQ(Slabs({}, 4, 1 << 20, 1).slab(0), Box{});
  EXPECT_EQ(Slabs({}, 4, 1 << 20, 1).max_bytes(), 4);
  EXPECT_EQ(Slabs({0, 5}, 4, 1 << 20, 1).count(), 0);
  EXPECT_EQ(Slabs({5, 0}, 4, 1, 1).count(), 0);
  EXPECT_EQ(Slabs({5, 0}, 4, 1, 1).max_bytes(), 0);
}

}  // namespace
}  // namespace reshard::plan_test
