#include "tests/support/changed_model.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>

#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"

namespace reshard {

std::string write_changed_model(const std::string& path, const std::function<char(std::size_t at, char byte)>& change) {
  const CommandResult made = reshard_cli({"synth", path, "--config", sample("tp8") + "/config.json", "--to", "hf"});
  EXPECT_EQ(made.exit_code, 0) << made.err;
  const std::string file = path + "/model.safetensors";
  std::string bytes = read_file(file);
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  for (std::size_t i = 8 + header; i < bytes.size(); i += 2) bytes[i] = change(i, bytes[i]);
  write_file(file, bytes);
  std::filesystem::remove(path + "/reshard_manifest.json");  // its digests describe the old values
  return path;
}

std::string converted(const std::string& from, const std::string& to, std::vector<std::string> options) {
  options.insert(options.begin(), {"convert", from, to});
  const CommandResult made = reshard_cli(std::move(options));
  EXPECT_EQ(made.exit_code, 0) << made.err;
  return to;
}

}  // namespace reshard
