// Runs a fuzz target on every file of a directory, so ordinary test runs replay the corpus.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

#define REPLAYED(name) extern "C" int fuzz_##name(const std::uint8_t* data, std::size_t size);
#include "fuzz_targets.inc"  // REPLAYED(name) for each target, from CMakeLists.txt
#undef REPLAYED

namespace {

using FuzzTarget = int(const std::uint8_t* data, std::size_t size);

// Returns null if there is no target of this name.
FuzzTarget* find_target(std::string_view wanted) {
#define REPLAYED(name) \
  if (wanted == #name) return fuzz_##name;
#include "fuzz_targets.inc"
#undef REPLAYED
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  FuzzTarget* const target = argc == 3 ? find_target(argv[1]) : nullptr;
  if (!target) {
    std::fprintf(stderr, "usage: %s TARGET DIRECTORY\n", argv[0]);
    return 2;
  }
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(argv[2])) {
    std::ostringstream text;
    text << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    const std::string bytes = text.str();
    std::printf("%s\n", entry.path().c_str());
    std::fflush(stdout);
    target(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    ++files;
  }
  return files > 0 ? 0 : 1;
}
