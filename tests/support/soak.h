// How thorough a run of the tests is. Exhaustive loops try every case in a plain build. Sanitizers are ten times
// slower, so such builds try every n-th case, the same in each run, unless RESHARD_SOAK is set (tests/soak.sh).
#pragma once

#include <cstdlib>

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

}  // namespace reshard
