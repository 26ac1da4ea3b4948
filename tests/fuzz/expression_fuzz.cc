// Fuzzes expressions of a merge: an accepted expression can be computed for every element, in either precision.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lib/convert/weights/expression.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::expression_fuzz {

FUZZ_TARGET(expression)(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  static const std::vector<std::vector<std::string>> kSources = {{"a"}, {"a", "b"}, {"base", "tuned", "c-1"}};
  for (const auto& sources : kSources) {
    const auto expression = Expression::parse(text, sources);
    if (!expression) {
      require(!expression.error().message().empty());
      continue;
    }
    constexpr Index kElements = 5;
    const std::array<float, kElements> floats = {0, -1.5F, 3e38F, 1e-40F, 7};
    const std::array<double, kElements> doubles = {0, -1.5, 1e308, 1e-310, 7};
    const std::vector<const float*> in(sources.size(), floats.data());
    const std::vector<const double*> wide(sources.size(), doubles.data());
    std::array<float, kElements> out{};
    std::array<double, kElements> wide_out{};
    expression->evaluate<float>(in, kElements, out.data());
    expression->evaluate<double>(wide, kElements, wide_out.data());
  }
  return 0;
}

}  // namespace reshard::expression_fuzz
