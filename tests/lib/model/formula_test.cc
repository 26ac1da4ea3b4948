#include "lib/model/formula.h"

#include <gtest/gtest.h>

#include <map>

namespace reshard::formula_test {
namespace {

std::optional<Index> number(std::string_view name) {
  static const std::map<std::string_view, Index> kNumbers = {
      {"heads", 32},        {"head_dim", 128}, {"hidden_size", 4096}, {"zero", 0}, {"huge", Index{1} << 62},
      {"least", INT64_MIN}, {"minus", -1}};
  const auto found = kNumbers.find(name);
  return found == kNumbers.end() ? std::nullopt : std::optional<Index>(found->second);
}

std::string error_of(std::string_view formula) {
  const auto n = evaluate(formula, number);
  return n ? "no error" : n.error().message();
}

TEST(Formula, IsASumOfProducts) {
  EXPECT_EQ(*evaluate("heads", number), 32);
  EXPECT_EQ(*evaluate("17", number), 17);
  EXPECT_EQ(*evaluate("heads*head_dim", number), 4096);
  EXPECT_EQ(*evaluate("heads*head_dim + 2*heads + 1", number), 4096 + 64 + 1);
  EXPECT_EQ(*evaluate(" 1 + heads * 3 ", number), 97);
}

TEST(Formula, DividesFromTheLeftAndRoundsDown) {
  EXPECT_EQ(*evaluate("hidden_size/heads", number), 128);
  EXPECT_EQ(*evaluate("7/2*2", number), 6);
  EXPECT_EQ(*evaluate("7*2/2", number), 7);
}

TEST(Formula, SubtractsRoundsUpAndRaises) {
  EXPECT_EQ(*evaluate("heads-1", number), 31);
  EXPECT_EQ(*evaluate("7-2*3-4", number), -3);
  EXPECT_EQ(*evaluate("7:2", number), 4);
  EXPECT_EQ(*evaluate("8:2+1", number), 5);
  EXPECT_EQ(*evaluate("minus*7:2", number), -3);
  EXPECT_EQ(*evaluate("hidden_size/300^2+1", number), 13 * 13 + 1);
  EXPECT_EQ(error_of("heads^100"), "'heads^100' overflows");
  EXPECT_EQ(error_of("2-least"), "'2-least' overflows");
}

TEST(Formula, SaysWhatIsWrong) {
  EXPECT_EQ(error_of("experts*heads"), "experts is missing");
  EXPECT_EQ(error_of("heads/zero"), "'heads/zero' divides by zero, which is 0");
  EXPECT_EQ(error_of("huge*heads"), "'huge*heads' overflows");
  EXPECT_EQ(error_of("huge+huge"), "'huge+huge' overflows");
  EXPECT_EQ(error_of("least/minus"), "'least/minus' overflows");
  EXPECT_EQ(*evaluate("heads/minus", number), -32);
  EXPECT_EQ(error_of("heads*"), "'heads*' is not a formula");
  EXPECT_EQ(error_of(""), "'' is not a formula");
  EXPECT_EQ(error_of("3x"), "'3x' is not a whole number");
}

TEST(Formula, IsExplainedWithItsNumbers) {
  EXPECT_EQ(explain("heads*head_dim", number), "heads 32 x head_dim 128");
  EXPECT_EQ(explain("hidden_size/2 + experts", number), "hidden_size 4,096 / 2 + experts");
}

}  // namespace
}  // namespace reshard::formula_test
