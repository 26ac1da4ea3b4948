// Tests which destinations may be replaced and which files are copied to them, for every writable format.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "formats/registry.h"
#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/expect_run.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::destination_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::vector<std::string> to(const Format& format) {
  std::vector<std::string> out = {"--to", std::string(format.name)};
  if (format.sharding == Sharding::kBoxes || format.holds_local_tensors()) out.insert(out.end(), {"--mesh", "tp=2"});
  return out;
}

void expect_refused(const CommandResult& r, const std::string& why) {
  EXPECT_EQ(r.exit_code, 2) << r.out << r.err;
  EXPECT_THAT(r.err, AllOf(HasSubstr(why), HasSubstr("it will not be replaced")));
}

TEST(Destination, WhatReshardWroteIsReplacedAndNothingBesideIt) {
  const std::string source = sample("tp8") + "/checkpoint";
  for (const Format* format : sampled(formats(), 3)) {
    if (!format->lay_out && !format->write_view) continue;
    SCOPED_TRACE(std::string(format->name));
    const TempDir dir;
    std::vector<std::string> force = to(*format);
    force.emplace_back("--force");
    const auto convert = [&] { return reshard_cli({"convert", source, dir / "out"}, force); };
    expect_success(convert());
    if (!fs::is_directory(dir / "out")) {
      const std::string first = read_file(dir / "out");
      expect_success(convert());
      fs::remove(dir / "out");
      dir.write("out/thesis.tex", "years of work");
      expect_refused(convert(), "the destination is not");
      EXPECT_EQ(all_files(dir / "out"), (std::map<std::string, std::string>{{"thesis.tex", "years of work"}}));
      fs::remove_all(dir / "out");
      dir.write("out", "years of work");
      expect_refused(convert(), "the destination is not");
      EXPECT_EQ(read_file(dir / "out"), "years of work");
      continue;
    }
    const auto first = all_files(dir / "out");
    expect_success(convert());
    EXPECT_EQ(all_files(dir / "out"), first);
    dir.write("out/thesis.tex", "years of work");
    dir.write("out/photos/1.jpg", "a");
    const auto before = all_files(dir / "out");
    expect_refused(convert(),
                   "the destination contains files that do not belong to its checkpoint: photos/, thesis.tex;");
    EXPECT_EQ(all_files(dir / "out"), before);
    EXPECT_FALSE(fs::exists(dir / "out.partial"));
    fs::remove_all(dir / "out/photos");
    fs::remove(dir / "out/thesis.tex");
    // Without a manifest, the format's reader decides which files belong to the checkpoint.
    fs::remove(dir / "out/reshard_manifest.json");
    if (!format->open) continue;
    dir.write("out/tokenizer.json", "{}");
    expect_success(convert());
    EXPECT_EQ(all_files(dir / "out"), first);
  }
}

// A user's own weights are in files that the format's reader would count as the checkpoint's.
TEST(Destination, WhatTheManifestDoesNotListIsNotReshards) {
  const std::string source = sample("tp8") + "/checkpoint";
  const std::string weights = read_file(sample("tp8") + "/hf.safetensors");
  for (const Format* format : sampled(formats(), 3)) {
    if (!format->lay_out || format->is_file) continue;
    SCOPED_TRACE(std::string(format->name));
    const TempDir dir;
    std::vector<std::string> line = to(*format);
    expect_success(reshard_cli({"convert", source, dir / "out", "-q"}, line));
    line.emplace_back("--force");
    for (const std::string name : {"lora.safetensors", "ema.safetensors", "model2.safetensors", "pytorch_model.bin",
                                   "__99_0.distcp", "tokenizer.json", "sub/model.safetensors"}) {
      dir.write("out/" + name, weights);
      const auto before = all_files(dir.path());
      const std::string named = name.substr(0, name.find('/') + 1);
      expect_refused(
          reshard_cli({"convert", source, dir / "out"}, line),
          "the destination contains files that do not belong to its checkpoint: " + (named.empty() ? name : named));
      expect_refused(reshard_cli({"merge", source, source, dir / "out", "--average"}, line),
                     "the destination contains files that do not belong to its checkpoint: ");
      EXPECT_TRUE(all_files(dir.path()) == before) << name;
      fs::remove_all(dir / ("out/" + name.substr(0, name.find('/'))));
    }
    // The same holds for a file with a listed name that another program has written since.
    const std::string listed = all_files(dir / "out").begin()->first;
    const std::string bytes = read_file(dir / ("out/" + listed));
    if (listed == "config.json" || listed == "reshard_manifest.json") continue;
    dir.write("out/" + listed, bytes + "more");
    expect_refused(reshard_cli({"convert", source, dir / "out"}, line), listed);
    dir.write("out/" + listed, bytes);
    expect_success(reshard_cli({"convert", source, dir / "out", "-q"}, line));
    dir.write("out/reshard_manifest.json", "{\"files\": ");
    EXPECT_NE(reshard_cli({"convert", source, dir / "out"}, line).exit_code, 0);
  }
}

// Without a manifest, the files of a checkpoint are those in its index and those with names of its format.
TEST(Destination, WithoutAManifestOnlyFilesOfTheFormatsNamesAreReplaced) {
  const std::string source = sample("tp8") + "/checkpoint";
  const std::string weights = read_file(sample("tp8") + "/hf.safetensors");
  for (const Format* format : sampled(formats(), 3)) {
    if (!format->lay_out || format->is_file || !format->open) continue;
    SCOPED_TRACE(std::string(format->name));
    const TempDir dir;
    std::vector<std::string> line = to(*format);
    expect_success(reshard_cli({"convert", source, dir / "out", "-q"}, line));
    fs::remove(dir / "out/reshard_manifest.json");
    line.emplace_back("--force");
    for (const std::string name : {"lora.safetensors", "ema.safetensors", "model2.safetensors", "model.ema.safetensors",
                                   "my-00001-of-00001.safetensors", "lora.ckpt", "ema.pt", "__99_0.distcp"}) {
      dir.write("out/" + name, weights);
      const auto before = all_files(dir.path());
      for (const std::vector<std::string>& command :
           {std::vector<std::string>{"convert", source, dir / "out"},
            std::vector<std::string>{"merge", source, source, dir / "out", "--average"}}) {
        const CommandResult r = reshard_cli(command, line);
        EXPECT_EQ(r.exit_code, 2) << name << r.out << r.err;
        EXPECT_THAT(r.err, HasSubstr("it will not be replaced")) << name;
      }
      EXPECT_TRUE(all_files(dir.path()) == before) << name;
      fs::remove(dir / ("out/" + name));
    }
    expect_success(reshard_cli({"convert", source, dir / "out", "-q"}, line));
  }
}

// Names that other programs give the files of a model, alone in a directory.
TEST(Destination, FilesOfOtherProgramsNamesAreReplaced) {
  const std::string source = sample("tp8") + "/checkpoint";
  const std::string weights = read_file(sample("tp8") + "/hf.safetensors");
  for (const auto& [name, is_models] :
       std::map<std::string, bool>{{"model.safetensors", true},
                                   {"model.fp16.safetensors", true},
                                   {"diffusion_pytorch_model.safetensors", true},
                                   {"adapter_model.safetensors", true},
                                   {"model-00001-of-00001.safetensors", true},
                                   {"shard-00001-model-00001-of-00001.safetensors", true},
                                   {"lora.safetensors", false},
                                   {"my_model.safetensors", false},
                                   {"model-old.safetensors", false},
                                   {"shard-model.safetensors", false}}) {
    const TempDir dir;
    dir.write("out/" + name, weights);
    const CommandResult r = reshard_cli({"convert", source, dir / "out", "--to", "hf", "--force", "-q"});
    EXPECT_EQ(r.exit_code, is_models ? 0 : 2) << name << r.err;
    EXPECT_EQ(fs::exists(dir / ("out/" + name)), !is_models || name == "model.safetensors") << name;
  }
}

TEST(Destination, APlainTorchModelIsACheckpoint) {
  const TempDir dir;
  const std::string source = sample("tp8") + "/checkpoint";
  expect_success(reshard_cli({"convert", source, dir / "ck", "--to", "bin", "-q"}));
  fs::create_directory(dir / "out");
  fs::copy(dir / "ck/pytorch_model.bin", dir / "out/pytorch_model.bin");
  expect_success(reshard_cli({"convert", source, dir / "out", "--to", "hf", "--force"}));
  EXPECT_TRUE(load_checkpoint(dir / "out") == load_checkpoint(sample("tp8") + "/hf.safetensors"));
  EXPECT_FALSE(fs::exists(dir / "out/pytorch_model.bin"));
}

TEST(Destination, OneFileOfWeightsMakesNoCheckpointOfAHome) {
  const TempDir dir;
  fs::create_directory(dir / "home");
  fs::copy(sample("tp8") + "/hf.safetensors", dir / "home/model.safetensors");
  dir.write("home/thesis.tex", "years of work");
  const auto before = all_files(dir / "home");
  expect_refused(reshard_cli({"convert", sample("tp8") + "/checkpoint", dir / "home", "--to", "hf", "--force"}),
                 "the destination contains files that do not belong to its checkpoint: thesis.tex;");
  EXPECT_EQ(all_files(dir / "home"), before);
}

TEST(Destination, WhatHoldsAnInputIsNotReplaced) {
  const TempDir dir;
  copy_sample("tp8", dir / "run");
  fs::copy(sample("tp8") + "/hf.safetensors", dir / "run/model.safetensors");
  fs::create_directory(dir / "model");
  fs::copy(sample("tp8") + "/hf.safetensors", dir / "model/model.safetensors");
  fs::copy(sample("tp8") + "/config.json", dir / "model/config.json");
  fs::create_directory(dir / "farm");
  fs::create_symlink(dir / "model/model.safetensors", dir / "farm/model.safetensors");
  const auto before = all_files(dir.path());
  const auto refused = [&](std::vector<std::string> args, const std::string& what) {
    args.insert(args.begin(), "convert");
    args.insert(args.end(), {"--to", "hf", "--force"});
    expect_refused(reshard_cli(args), "contains " + what + ", which this job reads");
    EXPECT_EQ(all_files(dir.path()), before);
  };
  refused({dir / "run/checkpoint", dir / "run"}, dir / "run/checkpoint");
  // Data that is reached through links, and another model's config.
  refused({dir / "farm", dir / "model"}, dir / "farm/model.safetensors");
  refused({dir / "run/checkpoint", dir / "model", "--config", dir / "model/config.json"}, dir / "model/config.json");
}

TEST(Destination, IsReplacedByWhateverPathLeadsToIt) {
  const TempDir dir;
  const std::string source = sample("tp8") + "/checkpoint";
  expect_success(reshard_cli({"convert", source, dir / "out", "--to", "hf"}));
  const auto first = all_files(dir.path());
  fs::create_directory(dir / "beside");
  for (const std::string path : {"out/.", "out/./", "beside/../out/.", "out//"}) {
    SCOPED_TRACE(path);
    expect_success(reshard_cli({"convert", source, dir / "out", "--to", "bin", "--force"}));
    expect_success(reshard_cli({"convert", source, dir / path, "--to", "hf", "--force"}));
    EXPECT_TRUE(all_files(dir.path()) == first);
  }
  fs::create_directory(dir / "empty");
  fs::create_directory(dir / "empty/inside");
  const auto r = reshard_cli({"convert", source, dir / "empty/inside/..", "--to", "hf", "--force"});
  expect_refused(r, "the destination is neither empty nor a checkpoint");
  EXPECT_TRUE(all_files(dir.path()) == first);
}

TEST(Destination, AMountedFileSystemIsRefusedBeforeTheWork) {
  const auto r = reshard_cli({"convert", sample("tp8") + "/checkpoint", "/proc", "--to", "hf", "--force"});
  EXPECT_EQ(r.exit_code, 2) << r.out << r.err;
  EXPECT_THAT(r.err, HasSubstr("/proc: a file system is mounted there"));
}

TEST(Destination, AViewReplacesOnlyAFileThatIsNotTheSource) {
  const TempDir dir;
  const std::string source = sample("tp8") + "/checkpoint";
  expect_success(reshard_cli({"convert", source, dir / "a.h5", "--to", "hdf5", "-q"}));
  fs::create_symlink(dir / "a.h5", dir / "link.h5");
  const std::string before = read_file(dir / "a.h5");
  for (const std::string name : {"a.h5", "link.h5"}) {
    const CommandResult r =
        reshard_cli({"convert", dir / "a.h5", dir / name, "--to", "hdf5-view", "--force", "--names", "keep"});
    EXPECT_EQ(r.exit_code, 2) << r.out << r.err;
    EXPECT_EQ(read_file(dir / "a.h5"), before);
  }
  expect_refused(reshard_cli({"convert", source, dir / "link.h5", "--to", "hdf5-view", "--force"}),
                 "not a file of this format");
}

// ---- side files

// Writes a Hugging Face model to `path`, with a tokenizer that is a link to `link`.
void write_model(const std::string& path, const std::string& tokenizer_link) {
  fs::create_directories(path);
  fs::copy(sample("tp8") + "/hf.safetensors", path + "/model.safetensors");
  fs::copy(sample("tp8") + "/config.json", path + "/config.json");
  fs::create_symlink(tokenizer_link, path + "/tokenizer.json");
}

TEST(SideFiles, AreNotCopiedFromOutsideTheCheckpoint) {
  const TempDir dir;
  dir.write("secret", "root:x:0:0");
  for (const std::string& link : {dir / "secret", std::string("../secret"), std::string("/proc/self/environ")}) {
    SCOPED_TRACE(link);
    fs::remove_all(dir / "model");
    fs::remove_all(dir / "out");
    write_model(dir / "model", link);
    const CommandResult r = reshard_cli({"convert", dir / "model", dir / "out", "--to", "hf"});
    expect_success(r);
    EXPECT_FALSE(fs::exists(dir / "out/tokenizer.json"));
    EXPECT_THAT(r.out,
                AllOf(HasSubstr("model/tokenizer.json is a link out of the checkpoint"), HasSubstr("is not copied")));
    EXPECT_TRUE(load_checkpoint(dir / "out") == load_checkpoint(dir / "model"));
  }
}

TEST(SideFiles, AConfigFromOutsideIsCopiedOnlyIfNamed) {
  const TempDir dir;
  fs::create_directories(dir / "model");
  fs::copy(sample("tp8") + "/hf.safetensors", dir / "model/model.safetensors");
  fs::create_symlink(sample("tp8") + "/config.json", dir / "model/config.json");
  const CommandResult r = reshard_cli({"convert", dir / "model", dir / "out", "--to", "dcp"});
  expect_success(r);
  EXPECT_THAT(r.out, AllOf(HasSubstr("model/config.json is a link out of the checkpoint"), HasSubstr("Llama")));
  EXPECT_FALSE(fs::exists(dir / "out/config.json"));
  expect_success(
      reshard_cli({"convert", dir / "model", dir / "named", "--to", "dcp", "--config", dir / "model/config.json"}));
  EXPECT_EQ(read_file(dir / "named/config.json"), read_file(sample("tp8") + "/config.json"));
}

TEST(SideFiles, LinksWithinTheCheckpointAndTheHuggingFaceCacheAreFollowed) {
  const TempDir dir;
  dir.write("model/original/tokenizer.json", "{}");
  write_model(dir / "model", "original/tokenizer.json");
  fs::create_directory_symlink(dir / "model", dir / "link");
  CommandResult r = reshard_cli({"convert", dir / "link", dir / "out", "--to", "hf"});
  expect_success(r);
  EXPECT_EQ(read_file(dir / "out/tokenizer.json"), "{}");

  // models--org--name/snapshots/REVISION/file -> ../../blobs/HASH
  const std::string cache = dir / "hub/models--org--name";
  fs::create_directories(cache + "/blobs");
  fs::create_directories(cache + "/snapshots/abc");
  const auto add = [&](const std::string& name, const std::string& hash, const std::string& bytes) {
    write_file(cache + "/blobs/" + hash, bytes);
    fs::create_symlink("../../blobs/" + hash, cache + "/snapshots/abc/" + name);
  };
  add("model.safetensors", "6f", read_file(sample("tp8") + "/hf.safetensors"));
  add("config.json", "7a", read_file(sample("tp8") + "/config.json"));
  add("tokenizer.json", "8b", "{\"a\": 1}");
  r = reshard_cli({"convert", cache + "/snapshots/abc", dir / "cached", "--to", "hf"});
  expect_success(r);
  EXPECT_THAT(r.out, Not(HasSubstr("leads out")));
  EXPECT_EQ(read_file(dir / "cached/tokenizer.json"), "{\"a\": 1}");
  EXPECT_EQ(read_file(dir / "cached/config.json"), read_file(sample("tp8") + "/config.json"));
  // A blob that is itself a link also leads outside.
  dir.write("secret", "root:x:0:0");
  fs::remove(cache + "/blobs/8b");
  fs::create_symlink(dir / "secret", cache + "/blobs/8b");
  r = reshard_cli({"convert", cache + "/snapshots/abc", dir / "again", "--to", "hf"});
  expect_success(r);
  EXPECT_FALSE(fs::exists(dir / "again/tokenizer.json"));
}

// Links to weights on other disks are the user's own arrangement: they are read as tensors, but not copied as files.
TEST(SideFiles, DataAreReadThroughLinks) {
  const TempDir dir;
  fs::create_directories(dir / "model");
  fs::create_symlink(sample("tp8") + "/hf.safetensors", dir / "model/model.safetensors");
  expect_success(reshard_cli({"convert", dir / "model", dir / "out", "--to", "hf"}));
  EXPECT_TRUE(load_checkpoint(dir / "out") == load_checkpoint(sample("tp8") + "/hf.safetensors"));
  fs::remove(dir / "model/model.safetensors");
  fs::create_symlink("/etc/passwd", dir / "model/model.safetensors");
  EXPECT_EQ(reshard_cli({"convert", dir / "model", dir / "no", "--to", "hf"}).exit_code, 3);
  EXPECT_FALSE(fs::exists(dir / "no"));
}

// ---- reports

TEST(Junit, IsWrittenToWhatStandsThere) {
  const TempDir dir;
  fs::create_symlink("real.xml", dir / "link.xml");
  fs::create_symlink("new.xml", dir / "dangling.xml");
  const auto verify = [&](const std::string& junit) {
    return reshard_cli({"verify", sample("tp8") + "/checkpoint", "--junit", junit});
  };
  expect_success(verify(dir / "plain.xml"));
  const auto is_report = AllOf(HasSubstr("<testsuites"), HasSubstr("</testsuites>"));
  EXPECT_THAT(read_file(dir / "plain.xml"), is_report);
  dir.write("real.xml", read_file(dir / "plain.xml") + "<!-- of an earlier run -->");
  expect_success(verify(dir / "link.xml"));
  EXPECT_TRUE(fs::is_symlink(dir / "link.xml"));
  EXPECT_THAT(read_file(dir / "real.xml"), AllOf(is_report, Not(HasSubstr("earlier run"))));
  expect_success(verify(dir / "dangling.xml"));
  EXPECT_TRUE(fs::is_symlink(dir / "dangling.xml"));
  EXPECT_THAT(read_file(dir / "new.xml"), is_report);

  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  const CommandResult piped =
      run_command({"/bin/bash", "-c",
                   "cat " + (dir / "pipe") + " > " + (dir / "read.xml") + " & " RESHARD_BINARY " verify " +
                       sample("tp8") + "/checkpoint -q --junit " + (dir / "pipe") + "; wait"});
  EXPECT_EQ(piped.err, "");
  EXPECT_TRUE(fs::is_fifo(dir / "pipe"));
  EXPECT_THAT(read_file(dir / "read.xml"), is_report);

  const CommandResult full = verify("/dev/full");
  EXPECT_EQ(full.exit_code, 5) << full.out << full.err;
  EXPECT_THAT(full.err, HasSubstr("/dev/full: cannot write: No space left on device"));
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  EXPECT_THAT(verify("/dev/stdout").out, is_report);
}

// ---- standard output

TEST(StandardOutput, ThatCannotBeWrittenIsAnError) {
  const std::string ck = sample("tp8") + "/checkpoint";
  for (const std::string& command :
       {"inspect " + ck, "inspect " + ck + " --json", "verify " + ck + " --json", "plan " + ck + " --to hf --json",
        "layout " + ck, "diff " + ck + " " + ck + " --json", std::string("--help"), std::string("--version")}) {
    const CommandResult r = run_command({"/bin/bash", "-c", RESHARD_BINARY " " + command + " > /dev/full"});
    EXPECT_EQ(r.exit_code, 5) << command << r.err;
    EXPECT_THAT(r.err, HasSubstr("standard output: cannot write all of it")) << command;
  }
}

TEST(StandardOutput, ThatNobodyReadsIsNone) {
  const TempDir dir;
  const std::string ck = sample("tp8") + "/checkpoint";
  for (const std::string& command :
       {"convert " + ck + " " + (dir / "out") + " --to hf", "inspect " + ck + " --shards"}) {
    const CommandResult r =
        run_command({"/bin/bash", "-c", "set -o pipefail; " RESHARD_BINARY " " + command + " | true"});
    EXPECT_EQ(r.exit_code, 0) << command << r.err;
    EXPECT_EQ(r.err, "") << command;
  }
  EXPECT_TRUE(load_checkpoint(dir / "out") == load_checkpoint(sample("tp8") + "/hf.safetensors"));
  const CommandResult closed = run_command(
      {"/bin/bash", "-c", RESHARD_BINARY " convert " + ck + " " + (dir / "closed") + " --to hf <&- >&- 2>&-"});
  EXPECT_EQ(closed.exit_code, 0);
  EXPECT_EQ(all_files(dir / "closed"), all_files(dir / "out"));
}

}  // namespace
}  // namespace reshard::destination_test
