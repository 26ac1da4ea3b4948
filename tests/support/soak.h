// How thorough a run of the tests is. Exhaustive loops try every case in a plain build. Sanitizers are ten times
// slower, so such builds try every n-th case, the same in each run, unless RESHARD_SOAK is set (tests/soak.sh).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <string_view>
#include <type_traits>
#include <vector>

namespace reshard {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
#else
inline constexpr bool kSanitized = false;
#endif

// Returns whether RESHARD_SOAK is set.
inline bool soak_is_asked() { return std::getenv("RESHARD_SOAK") != nullptr; }

// Returns whether to run tests that take minutes in a plain build and hours with sanitizers.
inline bool in_soak() { return !kSanitized && soak_is_asked(); }

// Returns the step of an exhaustive loop: 1, or `sanitized` in a build with sanitizers.
inline int every_nth(int sanitized) { return kSanitized && !soak_is_asked() ? sanitized : 1; }

// Returns the rows of a table that are tried: all, or every n-th where every_nth() says so. Tests begin at different
// rows, so that tests of one table try different ones.
template <typename Table>
auto sampled(const Table& table, int sanitized) {
  std::vector<std::decay_t<decltype(*std::begin(table))>> rows(std::begin(table), std::end(table)), out;
  const auto step = std::min(static_cast<std::size_t>(every_nth(sanitized)), std::max(rows.size(), std::size_t{1}));
  const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
  const std::size_t first = test ? std::string_view(test->name()).size() % step : 0;
  for (std::size_t i = first; i < rows.size(); i += step) out.push_back(std::move(rows[i]));
  return out;
}

template <typename Row>
std::vector<Row> sampled(std::initializer_list<Row> table, int sanitized) {
  return sampled<std::initializer_list<Row>>(table, sanitized);
}

}  // namespace reshard
