// Conversions of samples and of damaged copies of them by the program.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::conversions {

namespace fs = std::filesystem;

inline CommandResult convert(const std::string& from, const std::string& to, std::vector<std::string> options) {
  return reshard_cli({"convert", from, to}, std::move(options));
}

inline std::vector<std::string> leftovers(const std::string& destination) {
  std::vector<std::string> out;
  for (const std::string& path : {destination, destination + ".partial"})
    if (fs::exists(fs::symlink_status(path))) out.push_back(path);
  return out;
}

// Runs a conversion and expects this exit code and message, and no output.
inline void expect_failure(const std::string& from, const std::string& to, const std::vector<std::string>& options,
                           int code, const testing::Matcher<std::string>& message) {
  const CommandResult r = convert(from, to, options);
  EXPECT_EQ(r.exit_code, code) << r.out << r.err;
  EXPECT_THAT(r.err, testing::StartsWith("reshard: error: "));
  EXPECT_THAT(r.err, message);
  EXPECT_THAT(leftovers(to), testing::IsEmpty());
}

// A copy of a sample to damage: `path`/checkpoint and `path`/config.json.
struct Copy {
  TempDir dir;
  std::string root, checkpoint, out;
  explicit Copy(const std::string& name) : root(dir / "ck"), checkpoint(root + "/checkpoint"), out(dir / "out") {
    copy_sample(name, root);
  }
  std::string file(const std::string& name) const { return checkpoint + "/" + name; }
};

}  // namespace reshard::conversions
