#include "lib/checkpoint/catalog.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <utility>

namespace reshard::catalog_test {
namespace {

Fragment fragment(const Box& box, Extent extent = {}) {
  Fragment f;
  f.box = box;
  f.strides = row_major_strides(box.shape);
  f.extent = extent;
  return f;
}

Blob blob(const std::string& name, const Extent& extent) {
  Blob b;
  b.name = name;
  b.extent = extent;
  return b;
}

TEST(FragmentList, GivesBackWhatWasAdded) {
  FragmentList list(2);
  const Fragment plain = fragment({{0, 0}, {2, 3}}, {1, 64, 24});
  Fragment rare = fragment({{2, 0}, {2, 3}}, {0, 128, 48});
  rare.strides = {1, 2};
  rare.start = 12;
  rare.crc = 0;
  rare.big_endian = true;
  list.add(plain);
  list.add(rare);
  list.add(plain);
  ASSERT_EQ(list.size(), 3U);
  EXPECT_EQ(list.get(0), plain);
  EXPECT_EQ(list.get(1), rare) << "a CRC of zero is a CRC";
  EXPECT_EQ(list.get(2), plain);
  EXPECT_EQ(list.box(1), rare.box);
  EXPECT_EQ(list.extent(1), rare.extent);
  EXPECT_TRUE(FragmentList(3).empty());
}

TEST(FragmentList, AddsAPlainBoxAsTheFragmentItIs) {
  FragmentList boxes(2), fragments(2);
  Fragment with_crc = fragment({{0, 0}, {2, 3}}, {0, 0, 24});
  with_crc.crc = 7;
  for (FragmentList* list : {&boxes, &fragments}) list->add(with_crc);
  boxes.add({{2, 0}, {2, 3}}, {1, 64, 24});
  fragments.add(fragment({{2, 0}, {2, 3}}, {1, 64, 24}));
  EXPECT_EQ(boxes.get(1), fragments.get(1));
  boxes.set_extent(1, {2, 8, 24});
  EXPECT_EQ(boxes.extent(1), (Extent{2, 8, 24}));
}

TEST(FragmentList, KnowsTheSameBoxesWhereverTheyLie) {
  FragmentList a(1), b(1), other(1);
  a.add({{0}, {4}}, {0, 0, 16});
  b.add({{0}, {4}}, {5, 99, 16});
  other.add({{0}, {5}}, {0, 0, 16});
  EXPECT_TRUE(a.has_boxes_of(b));
  EXPECT_EQ(a.hash_of_boxes(), b.hash_of_boxes());
  EXPECT_FALSE(a.has_boxes_of(other));
  EXPECT_FALSE(FragmentList(1).has_boxes_of(FragmentList(2)));
}

TEST(FragmentList, AgreesWithAVectorOfFragments) {
  std::mt19937 rng(5);
  const auto number = [&](unsigned n) { return static_cast<Index>(rng() % n); };
  for (int round = 0; round < 200; ++round) {
    const int rank = static_cast<int>(rng() % 5);
    FragmentList list(rank);
    std::vector<Fragment> plain;
    const auto random_fragment = [&] {
      Fragment f;
      for (int d = 0; d < rank; ++d) {
        f.box.origin.push_back(number(100));
        f.box.shape.push_back(number(10));
      }
      f.strides = row_major_strides(f.box.shape);
      if (rank > 0 && rng() % 3 == 0) f.strides[0] += 1;
      f.extent = {static_cast<std::uint32_t>(rng() % 9), number(1000), number(1000)};
      // Extents as written by ranks with equal parts: all of them, or every third.
      if (round % 2 == 0 && rng() % 8 != 0) {
        const auto file = static_cast<std::uint32_t>(plain.size() * (round % 4 == 0 ? 1 : 3));
        f.extent = {file, Index{file % 4 == 0 ? 64 : 128}, 32};
      }
      if (rng() % 3 == 0) f.start = number(50);
      if (rng() % 3 == 0) f.crc = static_cast<std::uint32_t>(rng());
      f.big_endian = rng() % 5 == 0;
      return f;
    };
    for (int i = 0; i < 30; ++i) {
      const Fragment f = random_fragment();
      if (!plain.empty() && rng() % 3 == 0) {
        const std::size_t at = rng() % plain.size();
        list.set(at, f);
        plain[at] = f;
      } else {
        list.add(f);
        plain.push_back(f);
      }
      if (rng() % 10 == 0) list.pack();
    }
    ASSERT_EQ(list.size(), plain.size());
    for (std::size_t i = 0; i < plain.size(); ++i) ASSERT_EQ(list.get(i), plain[i]);
  }
}

// Lists share equal parts; changing one list must not affect another.
TEST(BoxPool, ListsThatShareBoxesAreChangedAlone) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::mt19937 rng(seed);
    const auto number = [&](unsigned n) { return static_cast<Index>(rng() % n); };
    const auto random_fragment = [&] {
      Fragment f = fragment({{number(2)}, {number(2)}}, {0, number(100), 8});
      if (rng() % 4 == 0) f.crc = static_cast<std::uint32_t>(rng());
      if (rng() % 4 == 0) f.start = number(3);
      return f;
    };
    BoxPool pool;
    std::vector<FragmentList> lists(4, FragmentList(1));
    std::vector<std::vector<Fragment>> plain(lists.size());
    for (int step = 0; step < 100; ++step) {
      const std::size_t i = rng() % lists.size(), j = rng() % lists.size();
      const Fragment f = random_fragment();
      switch (rng() % 6) {
        case 0:
        case 1:
          lists[i].add(f);
          plain[i].push_back(f);
          break;
        case 2:
          if (plain[i].empty()) break;
          lists[i].set(plain[i].size() / 2, f);
          plain[i][plain[i].size() / 2] = f;
          break;
        case 3:
          lists[i] = lists[j];
          plain[i] = plain[j];
          break;
        case 4:
          if (i == j) break;
          lists[i] = std::move(lists[j]);
          lists[j] = FragmentList(1);
          plain[i] = std::exchange(plain[j], {});
          break;
        default:
          for (FragmentList& list : lists) {
            pool.share(list);
            list.pack();
          }
      }
      for (std::size_t l = 0; l < lists.size(); ++l) {
        ASSERT_EQ(lists[l].size(), plain[l].size());
        for (std::size_t k = 0; k < plain[l].size(); ++k) ASSERT_EQ(lists[l].get(k), plain[l][k]) << "seed " << seed;
      }
    }
  }
}

TEST(FragmentList, IsEmptyWhereItWasMovedFrom) {
  FragmentList list(1);
  list.add({{0}, {4}}, {0, 0, 16});
  const FragmentList other = std::move(list);
  EXPECT_EQ(other.size(), 1U);
  EXPECT_TRUE(list.empty());  // NOLINT(bugprone-use-after-move)
  list.add({{1}, {2}}, {0, 0, 8});
  EXPECT_EQ(list.box(0), (Box{{1}, {2}}));
  EXPECT_EQ(other.box(0), (Box{{0}, {4}}));
}

TEST(Catalog, FindsWhatAMapFinds) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    std::mt19937 rng(seed);
    Catalog c;
    if (seed % 3 == 0) {
      ASSERT_TRUE(c.reserve(rng() % 100));
    }
    std::set<std::string> names;
    for (int step = 0; step < 200; ++step) {
      Tensor t;
      t.name = "t" + std::to_string(rng() % 150);
      ASSERT_EQ(c.add(t).has_value(), names.insert(t.name).second);
      if (rng() % 50 == 0) c.sort_by_name();
    }
    const Catalog copy = c;
    for (int i = 0; i < 150; ++i) {
      const std::string name = "t" + std::to_string(i);
      const auto found = copy.find(name);
      ASSERT_EQ(found.has_value(), names.contains(name));
      if (found) {
        EXPECT_EQ(copy.tensors()[*found].name, name);
      }
    }
  }
  EXPECT_EQ(Catalog().find("t"), std::nullopt);
}

TEST(Catalog, RefusesASecondTensorOfTheSameName) {
  Catalog c;
  c.root = "step-10";
  Tensor t;
  t.name = "w\n";
  ASSERT_TRUE(c.add(t));
  const Status again = c.add(t);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().message(), "step-10: tensor 'w\\x0a' is stored twice");
  EXPECT_EQ(c.tensors().size(), 1U);
}

TEST(Catalog, FindsTensorsAlsoAfterSorting) {
  Catalog c;
  for (const char* name : {"layers.10.w", "layers.2.w", "a", "layers.2.b"}) {
    Tensor t;
    t.name = name;
    ASSERT_TRUE(c.add(t));
  }
  c.blobs.push_back(blob("b10", {}));
  c.blobs.push_back(blob("b9", {}));
  c.sort_by_name();
  std::vector<std::string> names;
  for (const Tensor& t : c.tensors()) names.push_back(t.name);
  EXPECT_EQ(names, (std::vector<std::string>{"a", "layers.2.b", "layers.2.w", "layers.10.w"}));
  for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(c.find(names[i]), i);
  EXPECT_EQ(c.find("absent"), std::nullopt);
  EXPECT_EQ(c.blobs[0].name, "b9");
}

TEST(Catalog, AddsUpBytesAndNamesFiles) {
  Catalog c;
  c.root = "ckpt";
  c.files = {{"__0_0.distcp", 10}};
  Tensor t;
  t.name = "w";
  t.dtype = DType::kBFloat16;
  t.shape = {3, 5};
  ASSERT_TRUE(c.add(t));
  EXPECT_EQ(c.tensor_bytes(), 30);
  EXPECT_EQ(c.file_path(0), "ckpt/__0_0.distcp");
}

TEST(NaturalLess, CountsRunsOfDigitsAsNumbers) {
  EXPECT_TRUE(natural_less("layers.2", "layers.10"));
  EXPECT_FALSE(natural_less("layers.10", "layers.2"));
  EXPECT_TRUE(natural_less("layers.2", "layers.2.w"));
  EXPECT_TRUE(natural_less("a9b", "a10a"));
  EXPECT_TRUE(natural_less("a01", "a1"));
  EXPECT_FALSE(natural_less("a", "a"));
  EXPECT_TRUE(natural_less("a99999999999999999999998", "a99999999999999999999999"));
}

TEST(NaturalLess, IsAStrictOrder) {
  std::mt19937 rng(6);
  std::vector<std::string> names;
  for (int i = 0; i < 60; ++i) {
    std::string s(rng() % 6, ' ');
    for (char& c : s) c = "ab.0129"[rng() % 7];
    names.push_back(s);
  }
  for (const auto& a : names)
    for (const auto& b : names) {
      ASSERT_EQ(natural_less(a, b) || natural_less(b, a), a != b) << a << " " << b;
      ASSERT_FALSE(natural_less(a, b) && natural_less(b, a)) << a << " " << b;
      if (!natural_less(a, b)) continue;
      for (const auto& c : names)
        if (natural_less(b, c)) {
          ASSERT_TRUE(natural_less(a, c)) << a << " " << b << " " << c;
        }
    }
}

}  // namespace
}  // namespace reshard::catalog_test
