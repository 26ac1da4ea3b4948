// Tests what the program can open after it has entered its sandbox (tools/confine.h).
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::cli_sandbox_test {
namespace {

namespace fs = std::filesystem;

// A Hugging Face cache: a snapshot's files are links to blobs in another directory.
TEST(SandboxCli, ReadsWhatTheLinksOfASnapshotLeadTo) {
  const TempDir dir;
  for (const char* name : {"cache/blobs", "cache/snapshots/main", "out", "tmp"}) fs::create_directories(dir / name);
  const CommandResult made = reshard_cli({"synth", dir / "model", "--model", "llama3-tiny", "--to", "hf", "-q"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  for (const auto& entry : fs::directory_iterator(dir / "model")) {
    const std::string name = entry.path().filename().string();
    fs::rename(entry.path(), dir / ("cache/blobs/" + name + ".blob"));
    fs::create_symlink("../../blobs/" + name + ".blob", dir / ("cache/snapshots/main/" + name));
  }
  for (const char* source : {"cache/snapshots/main", "cache/snapshots/main/model.safetensors"}) {
    const std::string out = dir / ("out/" + fs::path(source).filename().string());
    const CommandResult r = run_command({RESHARD_BINARY, "convert", dir / source, out, "--to", "dcp", "-q"}, 60,
                                        {"TMPDIR=" + (dir / "tmp")});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    EXPECT_TRUE(fs::exists(out + "/.metadata"));
  }
}

}  // namespace
}  // namespace reshard::cli_sandbox_test
