// SPDX-License-Identifier: Apache-2.0
#include "lib/model/formula.h"

#include <cctype>

#include "lib/base/text.h"

namespace reshard {
namespace {

// A number or name in a formula, with the operator before it.
struct Factor {
  char sign = '+';  // + - * / : ^
  std::string_view text;
};

// Splits a formula at its operators; empty if it is malformed.
std::vector<Factor> factors_of(std::string_view formula) {
  std::vector<Factor> out;
  char sign = '+';
  while (true) {
    const std::size_t end = std::min(formula.find_first_of("+-*/:^"), formula.size());
    std::string_view text = formula.substr(0, end);
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
    while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
    if (text.empty()) return {};
    out.push_back({sign, text});
    if (end == formula.size()) return out;
    sign = formula[end];
    formula.remove_prefix(end + 1);
  }
}

bool is_number(std::string_view text) { return std::isdigit(static_cast<unsigned char>(text.front())) != 0; }

Result<Index> value_of(std::string_view text, const NumberOf& number_of) {
  if (is_number(text)) {
    if (const auto n = parse_number(text)) return *n;
    return corrupt("'" + printable(text) + "' is not a whole number");
  }
  if (const auto n = number_of(text)) return *n;
  return corrupt(printable(text) + " is missing");
}

constexpr Index kMaxPower = 64;  // of anything but 0 and 1, the rest overflows

// Nothing on overflow, and for an exponent below 0 or above kMaxPower.
std::optional<Index> power(Index base, Index exponent) {
  if (exponent < 0 || exponent > kMaxPower) return {};
  std::optional<Index> out = 1;
  for (Index i = 0; i < exponent && out; ++i) out = checked_mul(*out, base);
  return out;
}

}  // namespace

Result<Index> evaluate(std::string_view formula, const NumberOf& number_of) {
  const std::vector<Factor> factors = factors_of(formula);
  if (factors.empty()) return corrupt("'" + printable(formula) + "' is not a formula");
  Index sum = 0, product = 0;
  for (const Factor& f : factors) {
    const Index n = TRY(value_of(f.text, number_of));
    std::optional<Index> next;
    if (f.sign == '+' || f.sign == '-') {
      next = checked_add(sum, product);
      if (next) sum = *next;
      const auto term = checked_mul(n, f.sign == '+' ? 1 : -1);
      if (term) product = *term;
      if (!term) next = std::nullopt;
    } else if (f.sign == '*') {
      next = checked_mul(product, n);
      if (next) product = *next;
    } else if (f.sign == '^') {
      next = power(product, n);
      if (next) product = *next;
    } else {
      if (n == 0) return corrupt("'" + printable(formula) + "' divides by " + printable(f.text) + ", which is 0");
      const bool rounds_up = f.sign == ':' && product % n != 0 && (product > 0) == (n > 0);
      next = n == -1 ? checked_mul(product, n) : product / n + (rounds_up ? 1 : 0);
      if (next) product = *next;
    }
    if (!next) return corrupt("'" + printable(formula) + "' overflows");
  }
  const auto result = checked_add(sum, product);
  if (!result) return corrupt("'" + printable(formula) + "' overflows");
  return *result;
}

bool is_single_name(std::string_view formula) {
  const std::vector<Factor> factors = factors_of(formula);
  return factors.size() == 1 && !is_number(factors.front().text);
}

std::string in_usual_notation(std::string_view formula) {
  std::string sum, product;
  bool is_single = true;  // the product has one factor
  for (const Factor& f : factors_of(formula)) {
    if (f.sign == '+' || f.sign == '-') {
      sum += product;
      if (!sum.empty() || f.sign == '-') sum += f.sign;
      product = f.text;
    } else if (f.sign == ':') {
      product = "ceil(" + product + "/" + std::string(f.text) + ")";
    } else if (f.sign == '^') {
      product = (is_single ? product : "(" + product + ")") + "^" + std::string(f.text);
    } else {
      product += f.sign + std::string(f.text);
    }
    is_single = f.sign == '+' || f.sign == '-' || f.sign == ':';
  }
  return sum + product;
}

std::string explain(std::string_view formula, const NumberOf& number_of) {
  std::string out;
  for (const Factor& f : factors_of(formula)) {
    if (!out.empty())
      out += f.sign == '*' ? " x " : f.sign == '+' ? " + " : f.sign == '-' ? " - " : f.sign == '^' ? " ^ " : " / ";
    out += f.text;
    if (is_number(f.text)) continue;
    if (const auto n = number_of(f.text)) out += " " + with_commas(*n);
  }
  return out;
}

}  // namespace reshard
