// SPDX-License-Identifier: Apache-2.0
#include "formats/object_values.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "formats/encoding/pickle.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_archive.h"

namespace reshard {
namespace {

using pickle::Kind;
using pickle::Value;

// Returns the value's pickle in the form that write_value() gives it; nothing if it is not data.
std::optional<std::string> rewritten(Value value) {
  pickle::PickleWriter w;
  if (!pickle::write_value(w, value)) return std::nullopt;
  return std::move(w).finish();
}

std::optional<std::string> rewritten_item(std::string_view item) {
  const auto document = torch_archive::read_object_item(item);
  return document ? rewritten(document->root()) : std::nullopt;
}

bool is_builtin(Value callee, std::string_view name) {
  return callee.is_global("__builtin__", name) || callee.is_global("builtins", name);
}

// Returns the pickle of a part of a value that write_value() has written.
std::string rewritten_part(Value value) { return rewritten(value).value_or(std::string()); }

// Compares values that write_value() has written, which are trees of limited depth.
class TreeComparison {
 public:
  static bool equal(Value a, Value b) {
    if (a.kind() != b.kind()) return false;
    switch (a.kind()) {
      case Kind::kFloat:
        return equal_numbers(*a.as_float(), *b.as_float());
      case Kind::kTuple:
      case Kind::kList:
        return equal_elements(a, b);
      case Kind::kDict:
        return equal_dicts(a, b);
      case Kind::kObject:
        return equal_calls(a, b);
      case Kind::kGlobal:
        return b.is_global(a.module(), a.name());
      default:
        return rewritten_part(a) == rewritten_part(b);  // numbers and strings have one form
    }
  }

 private:
  static bool equal_numbers(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

  static bool equal_elements(Value a, Value b) {
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i)
      if (!equal(a[i], b[i])) return false;
    return true;
  }

  // If a key is set twice, the last value counts, as in Python.
  static std::map<std::string, Value> entries(Value dict) {
    std::map<std::string, Value> out;
    for (std::size_t i = 0; i < dict.size(); ++i) out.insert_or_assign(rewritten_part(dict.key(i)), dict.value(i));
    return out;
  }

  static bool equal_dicts(Value a, Value b) {
    const auto of_a = entries(a), of_b = entries(b);
    return std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(),
                      [](const auto& x, const auto& y) { return x.first == y.first && equal(x.second, y.second); });
  }

  static std::vector<std::string> elements(Value list) {
    std::vector<std::string> out;
    for (std::size_t i = 0; i < list.size(); ++i) out.push_back(rewritten_part(list[i]));
    std::sort(out.begin(), out.end());
    return out;
  }

  // A set is a call with a list of its elements.
  static bool is_set(Value v) { return is_builtin(v.callee(), "set") && v.args().size() == 1; }

  static bool equal_calls(Value a, Value b) {
    if (is_set(a) && is_set(b)) return elements(a.args()[0]) == elements(b.args()[0]);
    return equal(a.callee(), b.callee()) && equal(a.args(), b.args()) && equal(a.state(), b.state());
  }
};

}  // namespace

bool have_same_value(std::string_view a, std::string_view b) {
  if (a == b) return true;
  const auto of_a = rewritten_item(a), of_b = rewritten_item(b);
  if (!of_a || !of_b) return false;
  if (*of_a == *of_b) return true;
  const auto tree_a = pickle::parse(*of_a, "a"), tree_b = pickle::parse(*of_b, "b");
  return tree_a && tree_b && TreeComparison::equal(tree_a->root(), tree_b->root());
}

}  // namespace reshard
