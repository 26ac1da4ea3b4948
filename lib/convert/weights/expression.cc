// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/expression.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>

#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr Index kBlock = 1024;         // elements that go through all steps while they are in the nearest cache
constexpr std::size_t kMaxDepth = 64;  // of parentheses, and of values on the stack

bool is_name_start(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool is_name(char c) { return is_name_start(c) || std::isdigit(static_cast<unsigned char>(c)) != 0; }

}  // namespace

class ExpressionParser {
 public:
  ExpressionParser(std::string_view text, const std::vector<std::string>& sources) : text_(text), sources_(sources) {}

  Result<Expression> parse() {
    out_.is_xor_ = text_.find('^') != std::string_view::npos;
    const auto number = TRY(out_.is_xor_ ? exclusive_or() : sum());
    skip_spaces();
    if (at_ < text_.size()) return expected(out_.is_xor_ ? "'^' or the end" : "an operator or the end");
    if (number) return usage_error("'" + printable(text_) + "' contains no source");
    for (std::size_t s = 0; s < sources_.size(); ++s)
      if (std::none_of(out_.steps_.begin(), out_.steps_.end(),
                       [&](const Step& step) { return step.kind == Step::Kind::kSource && step.source == s; }))
        return usage_error("source '" + printable(sources_[s]) + "' is not used in '" + printable(text_) + "'");
    out_.text_ = text_;
    return std::move(out_);
  }

 private:
  using Step = Expression::Step;
  using Kind = Step::Kind;
  using Number = std::optional<double>;  // the value of a constant subexpression; other values are on the stack

  Error expected(const std::string& what) const {
    const std::string got = at_ < text_.size() ? "'" + printable(text_.substr(at_, 20)) + "'" : "the end";
    return usage_error("'" + printable(text_) + "': expected " + what + " at character " + std::to_string(at_ + 1) +
                       ", got " + got);
  }

  void skip_spaces() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }

  bool take(char c) {
    skip_spaces();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void push(Step step) {
    out_.steps_.push_back(step);
    if (step.kind == Kind::kSource) out_.depth_ = std::max(out_.depth_, ++on_stack_);
  }

  Result<Number> apply(Kind kind, const Number& a, const Number& b) {
    if (a && b) {
      const double value = kind == Kind::kAdd        ? *a + *b
                           : kind == Kind::kSubtract ? *a - *b
                           : kind == Kind::kMultiply ? *a * *b
                                                     : *a / *b;
      if (!std::isfinite(value)) return usage_error("'" + printable(text_) + "': a part of it is infinite or NaN");
      return Number(value);
    }
    if (!a && !b) --on_stack_;
    if (kind == Kind::kDivide && b && static_cast<float>(*b) == 0)
      return usage_error("'" + printable(text_) + "': divides by zero");
    if (std::abs(a.value_or(b.value_or(0))) > std::numeric_limits<float>::max())
      return usage_error("'" + printable(text_) + "': a number exceeds the range of float32");
    push({kind, 0,
          a   ? Step::Number::kLeft
          : b ? Step::Number::kRight
              : Step::Number::kNone,
          a.value_or(b.value_or(0))});
    return Number();
  }

  Result<Number> exclusive_or() {
    do {
      skip_spaces();
      TRY(source());
    } while (take('^'));
    return Number();
  }

  Result<Number> sum() {
    Number value = TRY(product());
    for (;;) {
      const bool plus = take('+');
      if (!plus && !take('-')) return value;
      const Number next = TRY(product());
      value = TRY(apply(plus ? Kind::kAdd : Kind::kSubtract, value, next));
    }
  }

  Result<Number> product() {
    Number value = TRY(factor());
    for (;;) {
      const bool times = take('*');
      if (!times && !take('/')) return value;
      const Number next = TRY(factor());
      value = TRY(apply(times ? Kind::kMultiply : Kind::kDivide, value, next));
    }
  }

  Result<Number> factor() {
    if (++depth_ > kMaxDepth) return usage_error("'" + printable(text_.substr(0, 80)) + "...': is nested too deeply");
    const auto value = inner();
    --depth_;
    if (value && on_stack_ > kMaxDepth)
      return usage_error("'" + printable(text_.substr(0, 80)) + "...': is nested too deeply");
    return value;
  }

  Result<Number> inner() {
    if (take('-')) {
      const Number value = TRY(factor());
      if (value) return Number(-*value);
      push({Kind::kNegate});
      return Number();
    }
    if (take('(')) {
      const Number value = TRY(sum());
      if (!take(')')) return expected("')'");
      return value;
    }
    skip_spaces();
    if (at_ < text_.size() && is_name_start(text_[at_])) return source();
    return number();
  }

  Result<Number> source() {
    std::size_t end = at_;
    while (end < text_.size() && is_name(text_[end])) ++end;
    const std::string name(text_.substr(at_, end - at_));
    const auto found = std::find(sources_.begin(), sources_.end(), name);
    if (found == sources_.end()) return expected("one of the sources " + join(sources_, ", "));
    at_ = end;
    Step step;
    step.source = found - sources_.begin();
    push(step);
    return Number();
  }

  Result<Number> number() {
    double value = 0;
    const char* const begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (error != std::errc() || !std::isfinite(value)) return expected("a number, a source or '('");
    at_ += end - begin;
    return Number(value);
  }

  const std::string_view text_;
  const std::vector<std::string>& sources_;
  std::size_t at_ = 0, depth_ = 0, on_stack_ = 0;
  Expression out_;
};

Result<Expression> Expression::parse(std::string_view text, const std::vector<std::string>& sources) {
  return ExpressionParser(text, sources).parse();
}

template <class Float>
void Expression::evaluate(std::span<const Float* const> inputs, Index n, Float* out) const {
  using Kind = Step::Kind;
  std::vector<Float> stack(depth_ * std::size_t{kBlock});
  const auto apply = [](const Step& step, Float* a, const Float* b, Index count, auto operation) {
    const auto number = static_cast<Float>(step.number);
    if (step.side == Step::Number::kLeft) {
      for (Index i = 0; i < count; ++i) a[i] = operation(number, a[i]);
    } else if (step.side == Step::Number::kRight) {
      for (Index i = 0; i < count; ++i) a[i] = operation(a[i], number);
    } else {
      for (Index i = 0; i < count; ++i) a[i] = operation(a[i], b[i]);
    }
  };
  for (Index begin = 0; begin < n; begin += kBlock) {
    const Index count = std::min(kBlock, n - begin);
    Float* top = stack.data() - kBlock;  // the last value
    for (const Step& step : steps_) {
      if (step.kind == Kind::kSource) {
        top += kBlock;
        std::copy_n(inputs[step.source] + begin, count, top);
        continue;
      }
      if (step.kind == Kind::kNegate) {
        for (Index i = 0; i < count; ++i) top[i] = -top[i];
        continue;
      }
      const Float* const right = top;
      if (step.side == Step::Number::kNone) top -= kBlock;
      switch (step.kind) {
        case Kind::kAdd:
          apply(step, top, right, count, [](Float x, Float y) { return x + y; });
          break;
        case Kind::kSubtract:
          apply(step, top, right, count, [](Float x, Float y) { return x - y; });
          break;
        case Kind::kMultiply:
          apply(step, top, right, count, [](Float x, Float y) { return x * y; });
          break;
        default:
          apply(step, top, right, count, [](Float x, Float y) { return x / y; });
      }
    }
    std::copy_n(top, count, out + begin);
  }
}
template void Expression::evaluate(std::span<const float* const>, Index, float*) const;
template void Expression::evaluate(std::span<const double* const>, Index, double*) const;

std::string weighted_sum(const std::vector<std::string>& sources, const std::vector<std::string>& weights) {
  std::vector<std::string> terms;
  for (std::size_t i = 0; i < sources.size(); ++i) terms.push_back(weights[i] + "*" + sources[i]);
  return join(terms, " + ");
}

std::string mean_of(const std::vector<std::string>& sources) {
  return "(" + join(sources, " + ") + ")/" + std::to_string(sources.size());
}

std::string xor_of(const std::vector<std::string>& sources) { return join(sources, " ^ "); }

std::string moving_average(const std::vector<std::string>& sources, const std::string& decay) {
  std::string out = sources.front();
  for (std::size_t i = 1; i < sources.size(); ++i)
    out = decay + "*" + (i > 1 ? "(" + out + ")" : out) + " + (1 - " + decay + ")*" + sources[i];
  return out;
}

}  // namespace reshard
