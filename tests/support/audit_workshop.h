// What tests of the audits work on: real models' shapes without data, and damaged copies of samples.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard {

inline const std::string kConfigs = RESHARD_TEST_DATA "/configs/";
using Options = std::vector<std::string>;

// A directory in which commands run, so that they print short paths that are the same everywhere.
class Workshop {
 public:
  const std::string& path() const { return dir_.path(); }
  std::string operator/(const std::string& name) const { return dir_ / name; }
  std::string write(const std::string& name, std::string_view bytes) const { return dir_.write(name, bytes); }

  CommandResult run(const Options& options) const {
    Options args = {"/usr/bin/env", "-C", dir_.path(), RESHARD_BINARY};
    args.insert(args.end(), options.begin(), options.end());
    return run_command(args, 180);
  }
  void must(const Options& options) const {
    const CommandResult r = run(options);
    if (r.exit_code != 0) ADD_FAILURE() << r.out << r.err;
  }

  // Makes "ck", the files of a model without its data. "config.json" is the model's own config.
  void model(const std::string& config, Options options = {}) const {
    write("config.json", read_file(kConfigs + config + ".json"));
    options.insert(options.begin(), {"synth", "ck", "--config", "config.json", "--to", "hf", "--headers-only", "-q"});
    must(options);
  }
  // Makes "ck", the metadata of a training checkpoint without its data files.
  void metadata(const std::string& config, Options options) const {
    write("config.json", read_file(kConfigs + config + ".json"));
    options.insert(options.begin(), {"synth", "ck", "--config", "config.json", "--metadata-only", "-q"});
    must(options);
  }
  // Makes "ck" and "config.json", a copy of a sample.
  void copy(const std::string& name) const {
    copy_sample(name, path());
    std::filesystem::rename(*this / "checkpoint", *this / "ck");
  }
  // Writes "ck", tensors under torchtitan's names as `ranks` ranks of FSDP save them, next to the sample's config.
  void save(const TensorValues& values, Index ranks = 2) const {
    write("config.json", read_file(sample("tp8") + "/config.json"));
    write_dcp(values, *this / "ck", Mesh({{"dp_shard", ranks}}));
  }
  // Makes "ck", a sample that is resharded to this layout.
  void lay_out(const std::string& name, const std::string& layout) const {
    write("config.json", read_file(sample(name) + "/config.json"));
    write("layout.json", layout);
    must({"convert", sample(name) + "/checkpoint", "ck", "--to", "dcp", "--layout", "layout.json", "-q"});
    std::filesystem::remove(*this / "ck/reshard_manifest.json");
  }

 private:
  TempDir dir_;
};

inline TensorValues tp8() { return load_checkpoint(sample("tp8") + "/full.safetensors"); }

// A rule of torchtitan's layout of Llama.
inline constexpr const char* kNorms = R"({"names": ["*norm.weight"], "splits": [{"axes": ["dp_shard"], "dim": 0}]})";

}  // namespace reshard
