// How thorough a run of the tests is. Loops that try everything do so where tests are built plainly. The sanitizers
// make them ten times as slow: there they try every n-th case, each run the same, unless RESHARD_SOAK is set
// (tests/soak.sh).
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

// Whether RESHARD_SOAK is set.
inline bool soak_is_asked() { return std::getenv("RESHARD_SOAK") != nullptr; }

// Whether there is time for what takes minutes where tests are built plainly. The sanitizers would make hours of it.
inline bool in_soak() { return !kSanitized && soak_is_asked(); }

// 1, or how far the sanitized builds go at a time.
inline int every_nth(int sanitized) { return kSanitized && !soak_is_asked() ? sanitized : 1; }

}  // namespace reshard
