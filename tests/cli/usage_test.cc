// Tests what all commands share: help, unknown words, errors and results for programs, counts, -q.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <regex>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "tests/support/checkpoints.h"
#include "tests/support/must.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::usage_test {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using Words = std::vector<std::string>;

const Words kCommands = {"inspect", "latest",   "diff",   "layout",      "convert", "merge", "delta",
                         "patch",   "watch",    "mount",  "synth",       "verify",  "check", "plan",
                         "doctor",  "families", "family", "completions", "man",     "help"};

// Makes a checkpoint with one tensor of one element, and a model.
class UsageTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string header = R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    one_ = dir_.write("one/model.safetensors", bytes + header + std::string(4, '\1'));
    one_ = dir_ / "one";
    ASSERT_EQ(reshard_cli({"synth", model_, "--model", "llama3-tiny", "--to", "hf"}).exit_code, 0);
    config_ = model_ + "/config.json";
  }

  const TempDir dir_;
  std::string one_, model_ = dir_ / "model", config_;
};

TEST_F(UsageTest, HelpAndVersionAreAskedForInEveryUsualWay) {
  for (const std::string& command : sampled(kCommands, 3)) {
    const CommandResult help = reshard_cli({"help", command}), same = reshard_cli({command, "--help"});
    EXPECT_EQ(help.exit_code, 0) << help.err;
    EXPECT_EQ(help.out, same.out);
    EXPECT_THAT(help.out, HasSubstr(command));
  }
  EXPECT_EQ(reshard_cli({"help"}).out, reshard_cli({"--help"}).out);
  EXPECT_EQ(reshard_cli({"-V"}).out, reshard_cli({"--version"}).out);
  EXPECT_THAT(reshard_cli({"help", "conver"}).err, HasSubstr("unknown command 'conver'; did you mean convert?"));
  // Without a command, prints the summary and fails.
  const CommandResult alone = reshard_cli({});
  EXPECT_EQ(alone.exit_code, 2);
  EXPECT_EQ(alone.out, "");
  EXPECT_EQ(alone.err, reshard_cli({"-h"}).out);
}

// Returns the columns that a line takes.
std::size_t columns(const std::string& line) {
  return static_cast<std::size_t>(std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

TEST_F(UsageTest, SummariesFitOnAScreen) {
  constexpr std::size_t kLines = 34;
  Words all = kCommands;
  all.insert(all.begin(), "");
  for (const std::string& command : sampled(all, 3)) {
    Words words = command.empty() ? Words{"-h"} : Words{command, "-h"};
    const CommandResult help = reshard_cli(words);
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_LE(split(help.out, '\n').size(), kLines) << command << "\n" << help.out;
    words.back() = "--help";
    EXPECT_GE(reshard_cli(words).out.size() + 120, help.out.size()) << command;
  }
  const std::string summary = reshard_cli({"-h"}).out;
  Words shown;
  for (const std::string& line : split(summary, '\n'))
    if (line.starts_with("  ")) shown.push_back(line.substr(2, line.find(' ', 2) - 2));
  EXPECT_THAT(shown, testing::UnorderedElementsAreArray(kCommands));
}

TEST_F(UsageTest, HelpIsAsWideAsTheScreen) {
  for (const std::string& command : sampled(kCommands, 3))
    for (const std::size_t width : {60U, 130U}) {
      const std::string set = "COLUMNS=" + std::to_string(width);
      const CommandResult help = run_command({RESHARD_BINARY, command, "--help"}, 60, {set});
      for (const std::string& line : split(help.out, '\n')) EXPECT_LE(columns(line), width) << line;
    }
  // A file has 100 columns, a terminal its own number within reasonable limits.
  const auto longest = [](const std::string& text) {
    std::size_t out = 0;
    for (const std::string& line : split(text, '\n')) out = std::max(out, columns(line));
    return out;
  };
  EXPECT_LE(longest(reshard_cli({"plan", "--help"}).out), 100U);
  EXPECT_EQ(run_command({RESHARD_BINARY, "plan", "--help"}, 60, {"COLUMNS=7"}).out,
            run_command({RESHARD_BINARY, "plan", "--help"}, 60, {"COLUMNS=60"}).out);
  EXPECT_EQ(run_command({RESHARD_BINARY, "plan", "--help"}, 60, {"COLUMNS=9999999999"}).out,
            run_command({RESHARD_BINARY, "plan", "--help"}, 60, {"COLUMNS=200"}).out);
}

TEST_F(UsageTest, HelpIsAsWideAsTheTerminal) {
  if (!std::filesystem::exists("/usr/bin/script")) GTEST_SKIP() << "there is no script(1)";
  for (const std::size_t width : {60U, 130U}) {
    const std::string line = "stty cols " + std::to_string(width) + "; " RESHARD_BINARY " plan --help";
    const CommandResult shown = run_command({"/usr/bin/script", "-qec", line, "/dev/null"}, 60, {"NO_COLOR=1"});
    const CommandResult expected =
        run_command({RESHARD_BINARY, "plan", "--help"}, 60, {"COLUMNS=" + std::to_string(width)});
    EXPECT_EQ(std::regex_replace(shown.out, std::regex("\r"), ""), expected.out);
  }
}

// Each option has one line of at most 70 characters, which begins with a capital letter and does not end with a stop.
TEST_F(UsageTest, DescriptionsAreShort) {
  std::size_t checked = 0;
  for (const std::string& command : kCommands) {
    const std::string page = reshard_cli({"man", command}).out;
    const std::vector<std::string> lines = split(page, '\n');
    for (std::size_t i = 0; i + 2 < lines.size(); ++i) {
      if (lines[i] == ".SH EXIT STATUS") break;
      if (lines[i] != ".TP") continue;
      std::string text = std::regex_replace(lines[i + 2], std::regex("\\\\-"), "-");
      text = text.substr(0, text.find(" (default"));
      text = text.substr(0, text.find(" (repeatable"));
      if (const std::size_t list = text.find(": "); text.size() > 70 && list != text.npos) text = text.substr(0, list);
      EXPECT_LE(text.size(), 71U) << command << ": " << text;
      EXPECT_TRUE(text[0] >= 'A' && text[0] <= 'Z') << command << ": " << text;
      ++checked;
    }
  }
  EXPECT_GT(checked, 100U);
  // 80 families are listed by a command of their own, and in no help text.
  for (const std::string& command : sampled(kCommands, 3))
    EXPECT_THAT(reshard_cli({command, "--help"}).out, Not(HasSubstr("qwen3_next")));
  EXPECT_THAT(reshard_cli({"families"}).out, HasSubstr("\nqwen3_next "));
}

TEST_F(UsageTest, WrongValuesAreNamedWithWhatIsExpected) {
  const std::string to = dir_ / "to", empty = dir_ / "empty";
  std::filesystem::create_directory(empty);
  const std::vector<std::pair<Words, std::string>> rows = {
      {{"convert", one_, to, "--to", "hf", "--dtype", "bf17"},
       "unknown dtype 'bf17'; did you mean bf16? Choose one of: keep, float32, bfloat16, float16, float8_e4m3fn, "
       "float8_e5m2"},
      {{"synth", to, "--model", "llama3-tiny", "--dtype", "fp61"},
       "unknown dtype 'fp61'; did you mean fp16? Choose one of: float32, bfloat16, float16"},
      {{"check", "--config", config_, "--mesh", "tp=1", "--dtype", "q4"}, "unknown dtype 'q4'; choose one of: float32"},
      {{"convert", one_, to, "--to", "hf", "--names", "mine"}, "unknown naming convention 'mine'; choose one of: hf, "},
      {{"convert", one_, to, "--to", "hf", "--family", "lama"},
       "unknown family 'lama'; did you mean llama? Choose one of: auto, none, llama"},
      {{"convert", one_, to, "--to", "hf", "--resume", "yes"},
       "--resume: unknown value 'yes'; choose one of: auto, never, require"},
      {{"convert", one_, to, "--to", "hf", "--threads", "many"}, "--threads: expected a whole number, got 'many'"},
      {{"convert", one_, to, "--to", "hf", "--threads", "0"}, "--threads: expected 1 to 1024, got '0'"},
      {{"convert", one_, to, "--to"}, "--to: expected a value"},
      {{"convert", one_, to, "--to", "hf", "--to", "dcp"}, "--to: expected one value, given several times"},
      {{"convert"}, "expected SRC, DST and --to; see reshard convert --help"},
      {{"check", "--config", config_}, "expected --mesh; see reshard check --help"},
      {{"diff", one_}, "expected B; see"},
      {{"diff", one_, one_, "--tolerance", "-1"}, "--tolerance: expected a finite number of at least 0, got '-1'"},
      {{"diff", one_, one_, "--tolerance", "1e400"},
       "--tolerance: expected a finite number of at least 0, got '1e400'"},
      {{"convert", one_, dir_ / "to", "--to", "hdf5", "--no-shuffle"}, "--no-shuffle needs --codec"},
      {{"diff", one_, one_, "--gpu-memory", "1GiB"}, "--gpu-memory needs --device cuda"},
      {{"synth", dir_ / "to", "--model", "llama3-tiny", "--metadata-only", "--headers-only"},
       "--metadata-only and --headers-only exclude each other"},
      {{"mount", one_, empty, "--as", "hdf5", "--shard-format", "bin"}, "--shard-format does not apply to --as hdf5"},
      {{"verify", one_, "--fail-on", "fatal"}, "unknown severity 'fatal'; choose one of: error, warning, note"},
      {{"synth", to, "--model", "gpt5"}, "unknown model 'gpt5'; choose one of: llama3-tiny, "},
      {{"layout", "--builtin", "x"}, "unknown built-in layout 'x'; choose one of: "},
      {{"man", "konvert"}, "unknown command 'konvert'; did you mean convert? See reshard --help"},
      {{"convert", one_, to, "--to", "dcp", "--codec", "zstd:3"},
       "--codec does not apply to --to dcp; it applies to orbax, orbax-zarr2, hdf5"},
  };
  for (const auto& [words, expected] : sampled(rows, 3)) {
    const CommandResult result = reshard_cli(words);
    EXPECT_EQ(result.exit_code, 2) << result.out;
    EXPECT_THAT(result.err, HasSubstr(expected));
  }
}

TEST_F(UsageTest, APathThatIsMistypedNamesANearOne) {
  const std::string run = dir_ / "run", to = dir_ / "to";
  std::filesystem::create_directory(run);
  for (const char* step : {"step-1000", "step-2500"}) std::filesystem::copy(model_, run + "/" + step);
  const std::string near = "; did you mean " + run + "/step-1000?";
  const std::vector<std::pair<Words, std::string>> rows = {
      {{"inspect", run + "/step-100"}, "step-100: not found" + near},
      {{"inspect", run + "/step-100/"}, "not found" + near},
      {{"inspect", dir_ / "rum/step-1000"}, "not found" + near},
      {{"inspect", dir_ / "rum/other"}, "not found; did you mean " + run + "?"},
      {{"convert", run + "/stpe-1000", to, "--to", "dcp"}, "not found" + near},
      {{"convert", model_, dir_ / "rnu/out", "--to", "dcp"}, "did you mean " + run + "?"},
      {{"verify", model_, "--against", run + "/step1000"}, "not found" + near},
      {{"verify", model_, "--config", model_ + "/confg.json"}, "; did you mean " + model_ + "/config.json?"},
      {{"merge", model_, "other=" + run + "/step-100", to, "--average", "--to", "hf"}, near},
      {{"latest", dir_ / "runn"}, "; did you mean " + run + "?"},
      {{"inspect", dir_ / "runs@main/x.pt"}, "not found"},
  };
  for (const auto& [words, expected] : rows) {
    const CommandResult result = reshard_cli(words);
    EXPECT_EQ(result.exit_code, 5) << result.out << result.err;
    EXPECT_THAT(result.err, HasSubstr(expected));
  }
  // A file that is missing inside a checkpoint was not mistyped.
  std::filesystem::rename(run + "/step-1000/model.safetensors", run + "/step-1000/model-1.safetensors");
  const std::string index = R"({"weight_map": {"lm_head.weight": "model-2.safetensors"}})";
  dir_.write("run/step-1000/model.safetensors.index.json", index);
  EXPECT_THAT(reshard_cli({"convert", run + "/step-1000", to, "--to", "dcp"}).err, Not(HasSubstr("did you mean")));
  EXPECT_THAT(reshard_cli({"inspect", dir_ / "something else"}).err, Not(HasSubstr("did you mean")));
}

// Trainers compress checkpoints (Composer's .pt.gz, .tar.gz), and downloads end in pages and pointers.
TEST_F(UsageTest, AFileThatIsWrappedSaysInWhat) {
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"\x1f\x8b\x08", "compressed by gzip; unpack it with gunzip"},
      {"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it with unzstd"},
      {"\xfd\x37zXZ", "compressed by xz; unpack it with unxz"},
      {"BZh9", "compressed by bzip2; unpack it with bunzip2"},
      {"\x04\x22\x4d\x18", "compressed by lz4; unpack it with unlz4"},
      {"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS to the file; git lfs pull gets it"},
      {"<!DOCTYPE html>", "a web page, perhaps an error"},
      {"<?xml version=\"1.0\"?>", "XML, perhaps an error"},
      {"\x93NUMPY\x01", "a NumPy array without a name"},
  };
  for (const auto& [head, expected] : rows) {
    const std::string file = dir_.write("wrapped.pt", head + std::string(600, 'x'));
    const CommandResult r = reshard_cli({"inspect", file});
    EXPECT_EQ(r.exit_code, 4) << r.err;
    EXPECT_THAT(r.err, HasSubstr(file + ": " + expected));
    EXPECT_THAT(r.err, Not(HasSubstr("supported:")));
  }
  for (const std::string name : {"model.keras", "arrays.npz"})
    EXPECT_THAT(reshard_cli({"inspect", dir_.write(name, "PK\3\4")}).err, HasSubstr("(" + name + " is ")) << name;
}

// Names, or the first bytes, tell which program saved something else.
TEST_F(UsageTest, FilesOfOtherProgramsAreToldByTheirOwner) {
  const std::string flax("\x83\xa4step\x05\xa6params\x80", 14);
  const std::vector<std::vector<std::string>> rows = {
      {"m.pdparams", "", "Paddle's"},
      {"m.pdopt", "", "Paddle's"},
      {"ck/0.metadata", "", "Paddle's"},
      {"ck/0_0.distcp", "", "Paddle's"},
      {"m.tensors", "|TZR|", "tensorizer's"},
      {"stream", "|TZR|", "tensorizer's"},
      {"m.weights.json", "{}", "Keras's list of .weights.h5 files, which can be opened one by one"},
      {"flax/checkpoint_5", flax, "Flax's"},
      {"old.pt2", "PK\3\4", "torch.export's"},
      {"snapshot/.snapshot_metadata", "{}", "torchsnapshot's"},
  };
  for (const auto& row : rows) {
    const std::string file = dir_.write(row[0], row[1]);
    const std::string directory = std::filesystem::path(file).parent_path().string();
    const std::string expected = std::filesystem::path(file).filename().string() + " is " + row[2];
    for (const std::string& path : {file, directory}) {
      if (path == dir_.path() || path.ends_with(".snapshot_metadata")) continue;
      const CommandResult r = reshard_cli({"inspect", path});
      EXPECT_EQ(r.exit_code, 4) << r.err;
      EXPECT_THAT(r.err, HasSubstr("unrecognised format (")) << path;
      EXPECT_THAT(r.err, HasSubstr(expected)) << path;
    }
  }
}

// Otherwise SRC and DST after `--include a` would be read as names too.
TEST_F(UsageTest, OptionsOfSeveralValuesTakeOneEachTime) {
  const std::string to = dir_ / "to";
  const std::vector<Words> lines = {{"convert", "--include", "x", one_, to, "--to", "dcp", "--family", "none"},
                                    {"convert", "--keep-dtype", "x", one_, to, "--to", "dcp", "--family", "none"},
                                    {"convert", "--exclude", "y", one_, to, "--to", "dcp", "--family", "none"},
                                    {"plan", "--allow", "cover", "--include", "*", one_, "--to", "dcp"},
                                    {"inspect", "--filter", "x", one_},
                                    {"diff", "--rename", "x=y", one_, one_},
                                    {"synth", "--without", "lm_head.weight", to, "--model", "llama3-tiny"}};
  for (const Words& words : sampled(lines, 3)) {
    const CommandResult result = reshard_cli(words);
    EXPECT_LT(result.exit_code, 2) << result.err;  // 1: diff found a difference
    std::filesystem::remove_all(to);
  }
  const CommandResult two = reshard_cli({"convert", "--include", "x", "y", one_, to, "--to", "dcp"});
  EXPECT_EQ(two.exit_code, 2);
  EXPECT_THAT(two.err, HasSubstr("unknown argument " + to + "; repeat --include for each value; see"));
}

TEST_F(UsageTest, DtypesHaveTheNamesOfTorchAndShortOnes) {
  const std::string to = dir_ / "to";
  for (const char* const name : {"bfloat16", "bf16", "torch.bfloat16", "BF16", "Torch.BFloat16"}) {
    ASSERT_EQ(
        reshard_cli({"convert", one_, to, "--to", "hf", "--family", "none", "--force", "--dtype", name}).exit_code, 0);
    EXPECT_THAT(reshard_cli({"inspect", to, "--filter", "*"}).out, HasSubstr("bfloat16")) << name;
  }
  for (const char* const name : {"fp32", "f32", "fp16", "F32", "half", "torch.float", "FP8_E4M3", "half-bf16"})
    EXPECT_EQ(reshard_cli({"check", "--config", config_, "--mesh", "tp=1", "--dtype", name}).exit_code,
              std::string(name) == "half-bf16" ? 2 : 0)
        << name;
}

// Returns the words that an error lists after "choose one of: ".
Words choices_of(const std::string& error) {
  std::smatch list;
  EXPECT_TRUE(std::regex_search(error, list, std::regex("[Cc]hoose one of: ([^;\n]*)"))) << error;
  return split(std::regex_replace(list[1].str(), std::regex(", "), ","), ',');
}

TEST_F(UsageTest, EveryChoiceThatAnErrorNamesIsTaken) {
  const std::string to = dir_ / "to";
  const std::vector<Words> rows = {
      {"check", "--config", config_, "--mesh", "tp=1", "--dtype"},
      {"check", "--config", config_, "--mesh", "tp=1", "--grad-dtype"},
      {"synth", to, "--model", "llama3-tiny", "--layers", "1", "--metadata-only", "--force", "--dtype"},
      {"synth", to, "--model", "llama3-tiny", "--layers", "1", "--metadata-only", "--force", "--names"},
      {"plan", one_, to, "--to", "hf", "--dtype"},
      {"plan", one_, to, "--to", "hf", "--names"},
      {"plan", one_, to, "--to", "hf", "--family"},
      {"plan", one_, to, "--to", "hf", "--quantize"},
      {"plan", one_, to, "--to"},
      {"inspect", model_, "--part"},
      {"verify", model_, "--fail-on"},
      {"layout", "--builtin"},
  };
  for (Words words : rows) {
    words.emplace_back("no-such-word");
    const Words choices = choices_of(reshard_cli(words).err);
    const std::size_t step = choices.size() > 8 ? choices.size() / 4 : 1;
    for (std::size_t i = 0; i < choices.size(); i += step) {
      words.back() = choices[i];
      EXPECT_THAT(reshard_cli(words).err, Not(HasSubstr("hoose one of"))) << join(words, " ");
    }
  }
}

TEST_F(UsageTest, AnUnknownValueIsFollowedByTheOneThatIsNear) {
  const std::string to = dir_ / "to";
  const std::vector<std::pair<Words, std::string>> rows = {
      {{"plan", one_, to, "--to", "fh"},
       "unknown format 'fh'; did you mean hf? Choose one of: hf, dcp, megatron-legacy, "},
      {{"plan", one_, to, "--to", "huggingface"}, "unknown format 'huggingface'; did you mean hf? Choose one of: hf, "},
      {{"plan", one_, to, "--to", "safetensors"}, "unknown format 'safetensors'; did you mean hf? Choose one of: hf, "},
      {{"plan", one_, to, "--to", "distributed-checkpoint"}, "'; did you mean dcp? Choose one of: hf, "},
      {{"plan", one_, to, "--to", "hf", "--names", "hugging-face"}, "'hugging-face'; did you mean hf? Choose one of: "},
      {{"plan", one_, to, "--to", "opr"}, "unknown format 'opr'; choose one of: hf, dcp, megatron-legacy, "},
      {{"plan", one_, to, "--to", "dcp", "--mesh", "tp=2,dpshard=4"}, "got 'dpshard=4'; did you mean dp_shard?"},
      {{"plan", one_, to, "--to", "dcp", "--mesh", "pt=2"}, "got 'pt=2'; did you mean tp?"},
      {{"plan", one_, to, "--to", "dcp", "--mesh", "dp_shrad=2"}, "got 'dp_shrad=2'; did you mean dp_shard?"},
      {{"plan", one_, to, "--to", "hff"},
       "unknown format 'hff'; did you mean hf? Choose one of: hf, dcp, megatron-legacy, "},
      {{"plan", one_, to, "--to", "hf", "--dtype", "bfloat"}, "'bfloat'; did you mean bfloat16? Choose one of: keep, "},
      {{"plan", one_, to, "--to", "hf", "--names", "torchtitn"},
       "'torchtitn'; did you mean torchtitan? Choose one of: "},
      {{"inspect", model_, "--part", "modl"}, "unknown part 'modl'; did you mean model? Choose one of: model"},
      {{"verify", one_, "--fail-on", "errors"}, "'errors'; did you mean error? Choose one of: error, warning, note"},
      {{"synth", to, "--model", "llama3-tinny"}, "did you mean llama3-tiny? Choose one of: llama3-tiny, "},
      {{"completions", "bsh"},
       "'bsh'; did you mean bash? Choose one of: bash, zsh, fish; see reshard completions --help"},
      {{"plan", one_, to, "--to", std::string(10000, 'x')}, "x'; choose one of: hf, dcp, megatron-legacy, "},
  };
  for (const auto& [words, expected] : rows) {
    const CommandResult r = reshard_cli(words);
    EXPECT_EQ(r.exit_code, 2) << join(words, " ");
    EXPECT_THAT(r.err, HasSubstr(expected));
  }
  // What may be a file too is not found.
  for (const Words& words : std::vector<Words>{{"plan", one_, to, "--to", "dcp", "--mesh", "tp=2", "--layout"},
                                               {"verify", one_, "--layout"},
                                               {"inspect", one_, "--source-layout"}}) {
    Words line = words;
    line.emplace_back("megatron-lama");
    const CommandResult r = reshard_cli(line);
    EXPECT_EQ(r.exit_code, 5) << join(line, " ");
    EXPECT_THAT(r.err,
                HasSubstr("megatron-lama: no such file or built-in layout; choose one of: colossalai-llama, hf, "));
    EXPECT_THAT(r.err, HasSubstr("; did you mean megatron-llama?"));
  }
}

TEST_F(UsageTest, FormatsAreListedWithTheUsualOnesFirst) {
  for (const char* const command : {"convert", "plan", "watch", "merge", "synth"})
    EXPECT_THAT(reshard_cli({"help", command}).out,
                ContainsRegex("--to FORMAT[^\n]*(: |\n +)hf(, | +Hugging[^\n]*\n +)dcp"))
        << command;
}

TEST_F(UsageTest, DoctorReportsBuildAndMachine) {
  const CommandResult text = reshard_cli({"doctor"}), json = reshard_cli({"doctor", "--json"});
  const Json report = must(parse_json(json.out, "doctor"));
  EXPECT_EQ(must(report.get_string("schema")), "reshard.doctor/1");
  const auto problems = must(report.get_array("problems"));
  EXPECT_EQ(json.exit_code, problems.empty() ? 0 : 1);
  EXPECT_EQ(text.exit_code, json.exit_code);
  for (const char* part : {"zstd", "mpi", "cuda", "nccl", "cufile", "fuse", "buckets"}) {
    EXPECT_THAT(text.out, HasSubstr(part));
    const Json& row = *report.find("build")->find(part);
    EXPECT_NE(row.find("found") != nullptr, row.find("missing") != nullptr) << part;
  }
  for (const char* fact : {"memory", "open files", "file size", "temporary", "mount", "sandbox", "ranks"}) {
    EXPECT_THAT(text.out, HasSubstr(fact));
    EXPECT_NE(report.find("machine")->find(fact), nullptr) << fact;
  }
  // doctor names each problem of a machine and its remedy.
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"RESHARD_MEMORY=lots ", "memory: RESHARD_MEMORY='lots' is not a size; set it to a size"},
      {"RESHARD_MEMORY=900TB ", "memory: 900TB is more than the "},
      {"TMPDIR=/nonexistent/place ", "temporary: /nonexistent/place is not a directory"},
      {"ulimit -n 200; ", "open files: checkpoints of many files need more than 200 open files"},
      {"ulimit -f 100; ", "file size: no file may be larger than "},
  };
  for (const auto& [set, expected] : wrong) {
    const CommandResult r = run_command({"/bin/sh", "-c", set + "COLUMNS=200 " RESHARD_BINARY " doctor"});
    EXPECT_EQ(r.exit_code, 1) << set << r.out << r.err;
    EXPECT_THAT(r.out, HasSubstr(expected)) << set;
  }
}

TEST_F(UsageTest, WordsThatNoOptionTakesAreNamedInTheirOrderWithWhatIsNear) {
  const std::vector<std::pair<Words, std::string>> rows = {
      {{"convert", "a", "b", "--to", "hf", "--max-shard", "3"},
       "unknown arguments --max-shard 3; did you mean --max-shard-size? See reshard convert --help"},
      {{"convert", "a", "b", "--to", "hf", "--max-shrad-size=3"},
       "unknown option --max-shrad-size=3; did you mean --max-shard-size? See reshard convert --help"},
      {{"verify", "a", "--byte", "--xyzzy", "c", "d"}, "unknown arguments --byte --xyzzy c d; did you mean --bytes?"},
      {{"verify", "a", "b", "c"}, "unknown arguments b c; see"},
      {{"inspect", "a", "--qqqqqqqqqqqq"}, "unknown option --qqqqqqqqqqqq; see"},
      {{"conver", "a", "b"}, "unknown command 'conver'; did you mean convert?"},
      {{"inspect", "--bogus", "--", "a"}, "unknown option --bogus; see reshard inspect --help"},
      {{"inspect", "--", "a", "b"}, "unknown argument b; see reshard inspect --help"},
      {{"inspect", "--"}, "expected PATH; see reshard inspect --help"},
      {{"verify", "--threads", "0", "--", "a"}, "--threads: expected 1 to 1024, got '0'; see reshard verify"},
      {{"diff", "--tolerance", "x", "--", "a", "b"}, "--tolerance: expected a number, got 'x'; see reshard diff"},
      {{"verfy", "a"}, "did you mean verify?"},
      {{"nonsense"}, "unknown command 'nonsense'; see reshard --help"},
  };
  for (const auto& [words, expected] : sampled(rows, 3)) {
    const CommandResult result = reshard_cli(words);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, HasSubstr(expected));
  }
}

TEST_F(UsageTest, ADashIsNoNameOfAnOutput) {
  const std::string change = "cd " + dir_.path() + " && " + RESHARD_BINARY + " ";
  for (const std::string line :
       {"inspect one --html -", "verify one --html -", "verify one --junit -", "plan one --to dcp --html -",
        "diff one one --html -", "convert one - --to dcp", "merge one one - --average --to hf",
        "synth - --model llama3-tiny", "check --config model/config.json --mesh tp=1 --html -",
        "check --config model/config.json --mesh tp=1 --junit -"}) {
    const CommandResult result = run_command({"/bin/sh", "-c", change + line});
    EXPECT_EQ(result.exit_code, 2) << line << result.out;
    EXPECT_THAT(result.err, HasSubstr("expected a path, got -")) << line;
    EXPECT_FALSE(std::filesystem::exists(dir_ / "-")) << line;
  }
}

TEST_F(UsageTest, ResultsForProgramsSayWhatTheyAre) {
  const std::vector<std::pair<std::string, Words>> rows = {
      {"inspect", {"inspect", one_}},
      {"verify", {"verify", one_}},
      {"diff", {"diff", one_, one_}},
      {"plan", {"plan", one_, "--to", "dcp", "--family", "none"}},
      {"plan", {"convert", one_, dir_ / "dry", "--to", "dcp", "--family", "none", "--dry-run"}},
      {"convert", {"convert", one_, dir_ / "out", "--to", "dcp", "--family", "none"}},
      {"view", {"convert", one_, dir_ / "look.h5", "--to", "hdf5-view", "--family", "none"}},
      {"view", {"convert", one_, dir_ / "dry.h5", "--to", "hdf5-view", "--family", "none", "--dry-run"}},
      {"check", {"check", "--config", config_, "--mesh", "tp=1"}},
      {"version", {"--version"}},
      {"families", {"families"}},
      {"layout", {"layout", one_}},
      {"latest", {"latest", dir_.path()}},
      {"convert", {"merge", one_, one_, dir_ / "merged", "--average", "--to", "hf", "--family", "none"}},
      {"doctor", {"doctor"}},
  };
  for (auto [name, words] : sampled(rows, 3)) {
    words.emplace_back("--json");
    const CommandResult result = reshard_cli(words);
    const auto json = parse_json(result.out, words[0]);
    ASSERT_TRUE(json) << words[0] << result.out << result.err;
    ASSERT_GT(must(json->as_object()).size(), 0);
    EXPECT_EQ(must(json->as_object())[0].key, "schema");
    EXPECT_EQ(must(json->get_string("schema")), "reshard." + name + "/1");
  }
}

TEST_F(UsageTest, ErrorsForProgramsAreJsonToo) {
  const std::string none = dir_ / "nowhere";
  const std::vector<std::pair<int, Words>> rows = {
      {5, {"inspect", none}},
      {5, {"verify", none}},
      {5, {"diff", one_, none}},
      {5, {"plan", none, "--to", "hf"}},
      {5, {"convert", none, dir_ / "out", "--to", "hf"}},
      {2, {"convert", one_, dir_ / "out", "--to", "nothing"}},
      {2, {"convert", one_, one_, "--to", "dcp"}},
      {5, {"check", "--config", none, "--mesh", "tp=1"}},
      {2, {"verify", one_, "--no-such-option"}},
      {2, {"nonsense"}},
      {2, {"mount", one_, "m", "--as", "hf"}},
      {2, {"latest"}},
      {3, {"inspect", dir_.write("broken.safetensors", "not one\n\0\0\0\0\0\0")}},
  };
  for (auto [code, words] : sampled(rows, 3)) {
    words.emplace_back("--json");
    const CommandResult result = reshard_cli(words);
    const auto json = parse_json(result.out, words[0]);
    ASSERT_TRUE(json) << words[0] << ": " << result.out << result.err;
    EXPECT_EQ(must(json->get_string("schema")), "reshard.error/1");
    const Json& error = *json->find("error");
    EXPECT_EQ(must(error.get_index("exit_code")), result.exit_code) << words[0];
    EXPECT_EQ(result.exit_code, code) << words[0] << result.err;
    EXPECT_FALSE(must(error.get_string("kind")).empty());
    EXPECT_THAT(result.err, HasSubstr("reshard: error: "));
  }
  // A failure after the JSON answer adds no second object.
  const CommandResult late = reshard_cli({"verify", one_, "--json", "--html", dir_ / "no/such/page.html"});
  EXPECT_NE(late.exit_code, 0);
  EXPECT_TRUE(parse_json(late.out, "verify")) << late.out;
}

TEST_F(UsageTest, OneIsCountedAsOne) {
  const std::string out = dir_ / "out";
  const std::vector<Words> rows = {
      {"inspect", one_},
      {"plan", one_, "--to", "dcp", "--family", "none"},
      {"plan", one_, "--to", "dcp", "--family", "none", "--ranks", "2"},
      {"convert", one_, out, "--to", "hf", "--family", "none", "--dtype", "bfloat16"},
      {"convert", one_, dir_ / "dcp", "--to", "dcp", "--family", "none"},
      {"convert", one_, dir_ / "look.h5", "--to", "hdf5-view", "--family", "none"},
      {"convert", out, dir_ / "again", "--to", "hf", "--family", "none"},
      {"verify", one_},
      {"verify", one_, "--values"},
      {"verify", dir_ / "dcp", "--bytes"},
      {"verify", one_, "--against", out},
      {"diff", one_, out},
      {"merge", one_, one_, dir_ / "merged", "--average", "--to", "hf", "--family", "none"},
      {"check", "--config", config_, "--mesh", "tp=1"},
      {"check", "--config", config_, "--mesh", "pp=4,tp=3"},
      {"layout", dir_ / "dcp"},
  };
  const std::regex wrong(
      R"((^|[^0-9,.])1 (tensors|moves|files|bytes|elements|rows|columns|layers|objects|ranks|pieces|)"
      R"(findings|values|heads|shards|stages|checks|sources|threads|machines|digests|parameters|)"
      R"(dimensions|CRCs|sums|errors|warnings|notes|copies|boxes|differences)\b)");
  for (const Words& words : sampled(rows, 3)) {
    const CommandResult result = reshard_cli(words);
    const std::string said = result.out + result.err;
    std::smatch match;
    EXPECT_FALSE(std::regex_search(said, match, wrong)) << words[0] << ": " << match.str() << "\n" << said;
  }
}

TEST_F(UsageTest, QuietIsQuietWhateverIsFound) {
  const std::string less = dir_ / "less";
  ASSERT_EQ(reshard_cli({"synth", less, "--model", "llama3-tiny", "--to", "hf", "--without", "*up_proj*"}).exit_code,
            0);
  const CommandResult found = reshard_cli({"verify", less, "--config", config_, "-q"});
  EXPECT_EQ(found.exit_code, 1);
  EXPECT_TRUE(found.out.starts_with("error ")) << found.out;
  for (const char* fact : {"verify  ", "cover  ", "config  ", "tensors checked", "looked at"})
    EXPECT_THAT(found.out, Not(HasSubstr(fact)));
  EXPECT_EQ(reshard_cli({"verify", model_, "-q"}).out, "");
  EXPECT_EQ(reshard_cli({"diff", model_, model_, "-q"}).out, "");
  EXPECT_EQ(reshard_cli({"plan", model_, "--to", "dcp", "-q"}).out, "");
  const CommandResult differs = reshard_cli({"diff", model_, less, "-q"});
  EXPECT_EQ(differs.exit_code, 1);
  EXPECT_THAT(differs.out, Not(HasSubstr("result")));
}

TEST_F(UsageTest, AnOutputsFilesAreThoseOfItsTensors) {
  const Words convert = {"convert", model_, dir_ / "cut", "--to", "hf", "--max-shard-size", "300kB"};
  const CommandResult result = reshard_cli(convert);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  Index shards = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir_ / "cut"))
    shards += entry.path().extension() == ".safetensors" ? 1 : 0;
  EXPECT_GT(shards, 1);
  EXPECT_THAT(result.out, HasSubstr(" out in " + std::to_string(shards) + " files and 1 of metadata "));
  EXPECT_THAT(reshard_cli({"plan", model_, "--to", "hf"}).out, HasSubstr(" out in 1 file  "));
}

// Once, Json::push_back returned the item instead of the list, and "architectures" became a string.
TEST_F(UsageTest, AMadeConfigListsItsArchitectures) {
  ASSERT_EQ(reshard_cli({"convert", model_, dir_ / "copy", "--to", "hf"}).exit_code, 0);
  for (const std::string& path : {config_, dir_ / "copy/config.json"}) {
    const Json json = must(parse_json(read_file(path), path));
    const auto list = must(json.get_array("architectures"));
    ASSERT_EQ(list.size(), 1U);
    EXPECT_EQ(must(list[0].as_string()), "LlamaForCausalLM");
  }
}

}  // namespace
}  // namespace reshard::usage_test
