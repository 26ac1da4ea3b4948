#include "lib/base/names.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "lib/base/text.h"

namespace reshard::names_test {
namespace {

using Strings = std::vector<std::string>;

TEST(Names, ANumberStandsForItself) {
  EXPECT_EQ(as_number("0"), 0);
  EXPECT_EQ(as_number("31"), 31);
  EXPECT_EQ(as_number("999999999999999999"), 999'999'999'999'999'999);
  for (const char* none : {"", "07", "-1", "+1", " 1", "1a", "\x01", "1000000000000000000"})
    EXPECT_FALSE(as_number(none)) << none;
}

TEST(Names, RunsOfNumbers) {
  EXPECT_EQ(runs_of({}), Strings{});
  EXPECT_EQ(runs_of({5}), Strings{"5"});
  EXPECT_EQ(runs_of({0, 1, 2, 5, 7, 8}), (Strings{"0..2", "5", "7..8"}));
  EXPECT_EQ(runs_of({0, 1, 3}, " to "), (Strings{"0 to 1", "3"}));
}

TEST(Names, FoldWhereEveryCombinationIsThere) {
  Strings names;
  for (int layer = 0; layer < 4; ++layer)
    for (int expert = 0; expert < 3; ++expert)
      names.push_back("layers." + std::to_string(layer) + ".experts." + std::to_string(expert) + ".w1");
  names.insert(names.begin() + 1, "norm.weight");
  EXPECT_EQ(fold_names(names), (Strings{"layers.{0..3}.experts.{0..2}.w1", "norm.weight"}));
  const auto list = fold(names);
  EXPECT_EQ(list[0].first, 0u);
  EXPECT_EQ(list[1].first, 1u);
  names.pop_back();  // layer 3 lacks an expert
  EXPECT_EQ(fold_names(names),
            (Strings{"layers.{0..2}.experts.{0..2}.w1", "norm.weight", "layers.3.experts.{0..1}.w1"}));
  EXPECT_EQ(fold_names({"a.1", "a.01", "a.2", "a.-3"}), (Strings{"a.{1..2}", "a.01", "a.-3"}));
  EXPECT_EQ(fold_names({"a.1", "a.1"}), Strings{"a.1"});
}

TEST(Names, FoldWhateverTheyAre) {
  EXPECT_EQ(fold_names({".", ".."}), (Strings{".", ".."}));
  EXPECT_EQ(fold_names({"\x01", "5"}), (Strings{"\x01", "5"}));
  EXPECT_EQ(fold_names({"", ".5", "5.", "5..5", ".6"}), (Strings{"", ".{5..6}", "5.", "5..5"}));
  EXPECT_EQ(fold_names({"1:.3", "1:.4", "11:.3"}), (Strings{"1:.{3..4}", "11:.3"}));
}

// Folds random names of few characters: each pattern matches only names of the list, and every name is matched by one
// pattern.
TEST(Names, FoldedPatternsMatchTheirNames) {
  std::mt19937 rng(3);
  constexpr std::string_view kCharacters = "..012ab\x01";
  for (int round = 0; round < 500; ++round) {
    std::set<std::string> names;
    for (auto n = rng() % 30; n > 0; --n) {
      std::string name;
      for (auto k = rng() % 7; k > 0; --k) name += kCharacters[rng() % kCharacters.size()];
      names.insert(name);
    }
    const Strings list(names.begin(), names.end());
    std::size_t matched = 0;
    for (const std::string& pattern : fold_names(list))
      for (const std::string& name : list) matched += glob_match(pattern, name) ? 1 : 0;
    EXPECT_EQ(matched, list.size());
  }
}

TEST(Names, SomeOfMany) {
  EXPECT_EQ(some_of({}), "");
  EXPECT_EQ(some_of({"a", "b", "c"}), "a, b, c");
  EXPECT_EQ(some_of({"a", "b", "c", "d"}), "a, b, c and 1 more");
  EXPECT_EQ(some_of(Strings(2000, "a"), 1), "a and 1,999 more");
  EXPECT_EQ(folded({"a.0", "a.1", "b\x1b", "c", "d", "e"}), "a.{0..1}, b\\x1b, c and 2 more");
}

}  // namespace
}  // namespace reshard::names_test
