// Tests that a checkpoint is recognised and opened with one listing of each of its directories.
#include <dirent.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <map>

#include "formats/open.h"
#include "formats/vllm/vllm.h"
#include "lib/base/syscalls.h"
#include "lib/checkpoint/path_snapshot.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::place_test {
namespace {

namespace fs = std::filesystem;

std::map<std::string, int> listed;  // how often each directory was listed to its end

dirent* counted_readdir(DIR* directory) {
  dirent* const entry = ::readdir(directory);
  const int error = errno;
  if (entry == nullptr) ++listed[fs::read_symlink("/proc/self/fd/" + std::to_string(::dirfd(directory)))];
  errno = error;
  return entry;
}

TEST(PlaceTest, NoFormatListsADirectoryTwice) {
  Syscalls calls = sys();
  calls.readdir = counted_readdir;
  const ScopedSyscalls scoped(calls);
  std::map<std::string_view, int> opened;  // number of checkpoints by format
  for (const std::string& below : {sample(""), test_data("")})
    for (const fs::directory_entry& there : fs::recursive_directory_iterator(below)) {
      const std::string ending = there.path().extension();
      if (!there.is_directory() && ending != ".json" && ending != ".pt" && ending != ".gguf") continue;
      listed.clear();
      const auto open = open_if_known(there.path());
      if (!open || !*open) continue;
      ++opened[(*open)->format->name];
      for (const auto& [directory, times] : listed)
        EXPECT_EQ(times, 1) << directory << ", to open " << there.path() << " as " << (*open)->format->name;
    }
  for (const Format* format : formats())
    if (format->open && !format->is_file && format != &kVllmFormat) {  // no fixture is of this format
      EXPECT_GT(opened[format->name], 0) << format->name;
    }
}

TEST(PlaceTest, KeepsWhatItSaw) {
  const TempDir dir;
  fs::create_directories(dir / "run/step1");
  write_file(dir / "run/latest", "step1");
  write_file(dir / "run/step1/a", "");
  const auto run = PathSnapshot::look(dir / "run");
  ASSERT_TRUE(run);
  EXPECT_EQ(**run->text_of("latest", 10), "step1");
  const auto step = run->inside("step1");
  ASSERT_TRUE(step);
  EXPECT_TRUE((*step)->has_file("a"));
  EXPECT_TRUE((**(*step)->parent()).has_directory("step1"));
  write_file(dir / "run/latest", "step2");
  fs::remove_all(dir / "run/step1");
  EXPECT_EQ(**run->text_of("latest", 10), "step1");
  EXPECT_EQ(*run->inside("step1"), *step);
  EXPECT_FALSE((**PathSnapshot::look(dir / "run")->inside("step1")).is_there());
}

}  // namespace
}  // namespace reshard::place_test
