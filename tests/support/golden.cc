#include "tests/support/golden.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <regex>

#include "lib/base/file.h"
#include "tests/support/checkpoints.h"

namespace reshard {
namespace {

std::string golden_path(const std::string& name) { return RESHARD_SOURCE_DIR "/tests/cli/golden/" + name; }

}  // namespace

std::string without_times(std::string text) {
  text = std::regex_replace(text, std::regex(R"( in \d+(\.\d)? m?s)"), " in TIME");
  return std::regex_replace(text, std::regex(R"re(time="[0-9.]+")re"), "time=\"TIME\"");
}

std::string without(std::string text, const std::string& part) {
  for (std::size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, part.size());
  return text;
}

std::string read_golden(const std::string& name) { return read_file(golden_path(name)); }

void expect_golden(const std::string& name, const std::string& got) {
  const std::string path = golden_path(name);
  const char* update = std::getenv("RESHARD_UPDATE_GOLDEN");
  if (update != nullptr && *update != '\0') {
    ASSERT_TRUE(replace_file(path, got));
    return;
  }
  ASSERT_TRUE(*path_exists(path)) << path << ": run with RESHARD_UPDATE_GOLDEN=1 to make it";
  EXPECT_EQ(got, read_file(path)) << "run with RESHARD_UPDATE_GOLDEN=1 if this is as it should be";
}

}  // namespace reshard
