// SPDX-License-Identifier: Apache-2.0
// What a merge makes of each element of its sources: "base + 0.7*(tuned - base)", or "new ^ old".
//
//   merge    = sum | source { "^" source }
//   sum      = product { ("+" | "-") product }
//   product  = factor { ("*" | "/") factor }
//   factor   = "-" factor | number | source | "(" sum ")"
//
// Operations between numbers are computed once, in double precision. All others are computed in the precision of the
// elements, in the order written, and each step is rounded to nearest, as NumPy does. (torch divides a number by a
// tensor as a product with the reciprocal, which may differ in the last bit.)
//
// "^" is the exclusive or of the elements' bits, in the dtype that they are stored in. It applies to every dtype.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

class Expression {
 public:
  // Parses an expression. `sources` are the names of its sources, each of which must occur. A usage error gives the
  // position of the fault.
  static Result<Expression> parse(std::string_view text, const std::vector<std::string>& sources);

  // Computes out[i] from inputs[source][i], for i < n. `Float` is float or double. Thread-safe.
  template <class Float>
  void evaluate(std::span<const Float* const> inputs, Index n, Float* out) const;

  // Returns whether it is the exclusive or of the sources. evaluate() is then not defined.
  bool is_xor() const { return is_xor_; }

  const std::string& text() const { return text_; }

 private:
  friend class ExpressionParser;
  // A step of a stack machine. If a step has two operands, one may be a constant; `side` says which.
  struct Step {
    enum class Kind { kSource, kNegate, kAdd, kSubtract, kMultiply, kDivide };
    enum class Number { kNone, kLeft, kRight };
    Kind kind = Kind::kSource;
    std::size_t source = 0;
    Number side = Number::kNone;
    double number = 0;
  };
  std::string text_;
  std::vector<Step> steps_;
  std::size_t depth_ = 0;  // most values on the stack at once
  bool is_xor_ = false;
};

// Return expressions over the named sources: the weighted sum, the mean, and the moving average, which mixes each
// source into the result of those before it, "decay*before + (1 - decay)*it".
std::string weighted_sum(const std::vector<std::string>& sources, const std::vector<std::string>& weights);
std::string mean_of(const std::vector<std::string>& sources);
std::string moving_average(const std::vector<std::string>& sources, const std::string& decay);
// Returns the exclusive or of all sources.
std::string xor_of(const std::vector<std::string>& sources);

}  // namespace reshard
