// Shared by the fuzz targets: the name of their entry point, and a check that is active in every build.
//
//   FUZZ_TARGET(json)(const std::uint8_t* data, std::size_t size) { ...; return 0; }
//
// defines the function that libFuzzer calls if each target is a program of its own, and fuzz_json in fuzz_replay.
#pragma once

#include <cstdlib>

#ifdef RESHARD_FUZZ
#define FUZZ_TARGET(name) extern "C" int LLVMFuzzerTestOneInput
#else
#define FUZZ_TARGET(name) extern "C" int fuzz_##name
#endif

namespace reshard {

inline void require(bool fact) {
  if (!fact) std::abort();
}

}  // namespace reshard
