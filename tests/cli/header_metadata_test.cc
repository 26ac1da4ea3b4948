// Tests that the __metadata__ of safetensors headers is in every copy, or that the copy is refused if its tensors need
// it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "formats/encoding/safetensors_header.h"
#include "formats/registry.h"
#include "lib/base/file.h"
#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::header_metadata_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;
using Entries = std::map<std::string, std::string>;

const std::string kInt8 =
    R"({"_type": "Int8Tensor", "_data": {"block_size": [1, 64]}, "_tensor_data_names": ["qdata"]})";
const std::string kPlain = R"({"_type": "Tensor"})";

struct Spec {
  std::string name;
  DType dtype;
  Dims shape;
};

std::string file_of(const std::vector<Spec>& tensors, const SafetensorsMetadata& metadata) {
  std::vector<SafetensorsEntry> entries;
  for (const Spec& t : tensors) entries.push_back({.name = t.name, .dtype = t.dtype, .shape = t.shape});
  std::string bytes = *safetensors_header(entries, metadata, 8);
  bytes.resize(static_cast<std::size_t>(entries.back().offset + entries.back().length), 'x');
  return bytes;
}

Entries metadata_of(const std::string& path) {
  const auto file = File::open(path);
  const auto header = read_safetensors_header(*file);
  return {header->metadata.begin(), header->metadata.end()};
}

// Two torchao modules, with a list in each file's header of the tensors in that file.
class HeaderMetadata : public testing::Test {
 protected:
  HeaderMetadata() {
    for (const std::string layer : {"0", "1"}) {
      const std::string module = "encoder.block." + layer + ".wi";
      dir_.write("source/model-0000" + std::to_string(std::stoi(layer) + 1) + "-of-00002.safetensors",
                 file_of({{module + "._weight_qdata", DType::kInt8, {64, 64}},
                          {module + "._weight_scale", DType::kFloat32, {64, 1}},
                          {module + ".bias", DType::kFloat32, {64}}},
                         {{"format", "pt"},
                          {"ss_network_dim", "64"},
                          {"tensor_names", "[\"" + module + ".weight\", \"" + module + ".bias\"]"},
                          {module + ".weight", kInt8},
                          {module + ".bias", kPlain}}));
    }
  }

  CommandResult convert(const std::string& to, const std::string& out, std::vector<std::string> more = {}) {
    return reshard_cli({"convert", dir_ / "source", dir_ / out, "--to", to, "--family", "none", "-q"}, more);
  }
  static std::vector<std::string> names_of(const Entries& entries) {
    std::vector<std::string> out;
    const auto list = parse_json(entries.at("tensor_names"), "");
    const auto items = list->as_array();
    for (const Json& item : *items) out.emplace_back(*item.as_string());
    return out;
  }
  static constexpr auto kAll = [](const std::string& wrapper) {
    return UnorderedElementsAre(wrapper + "encoder.block.0.wi.weight", wrapper + "encoder.block.0.wi.bias",
                                wrapper + "encoder.block.1.wi.weight", wrapper + "encoder.block.1.wi.bias");
  };

  const TempDir dir_;
};

TEST_F(HeaderMetadata, DescribesTheTensorsOfEachCopyUnderTheirNames) {
  struct Case {
    std::vector<std::string> options;
    std::string wrapper;
    bool has_notes;
  };
  for (const auto& [options, wrapper, has_notes] : std::vector<Case>{{{}, "", true},
                                                                     {{"--max-shard-size", "5000"}, "", true},
                                                                     {{"--rename", "encoder=a.encoder"}, "a.", true},
                                                                     {{"--dtype", "bfloat16"}, "", false}}) {
    ASSERT_EQ(convert("hf", "out", options).exit_code, 0);
    for (const auto& file : fs::directory_iterator(dir_ / "out")) {
      if (file.path().extension() != ".safetensors") continue;
      const Entries entries = metadata_of(file.path());
      EXPECT_THAT(names_of(entries), kAll(wrapper));
      EXPECT_EQ(entries.at("format"), "pt");
      EXPECT_EQ(entries.at(wrapper + "encoder.block.1.wi.weight"), kInt8);
      EXPECT_EQ(entries.at(wrapper + "encoder.block.0.wi.bias"), kPlain);
      EXPECT_EQ(entries.contains("ss_network_dim"), has_notes);
    }
    fs::remove_all(dir_ / "out");
  }
}

TEST_F(HeaderMetadata, OfTensorsThatAreLeftOutIsLeftOut) {
  ASSERT_EQ(convert("hf", "out", {"--exclude", "*.0.*"}).exit_code, 0);
  const Entries entries = metadata_of(dir_ / "out/model.safetensors");
  EXPECT_THAT(names_of(entries), UnorderedElementsAre("encoder.block.1.wi.weight", "encoder.block.1.wi.bias"));
  EXPECT_EQ(entries.size(), 5U);
}

// Converts through every format that can store the metadata, and back; the others are refused before anything is
// written.
TEST_F(HeaderMetadata, IsNeverLostByAFormat) {
  for (const Format* format : formats()) {
    if (!format->lay_out || !format->own_names.empty() || format->name.starts_with("vllm")) continue;
    SCOPED_TRACE(std::string(format->name));
    const CommandResult r = convert(std::string(format->name), "way");
    if (r.exit_code == 0) {
      ASSERT_EQ(reshard_cli({"convert", dir_ / "way", dir_ / "back", "--to", "hf", "--family", "none", "-q"}).exit_code,
                0);
      EXPECT_THAT(names_of(metadata_of(dir_ / "back/model.safetensors")), kAll(""));
    } else {
      EXPECT_EQ(r.exit_code, 4) << r.err;
      EXPECT_FALSE(fs::exists(dir_ / "way"));
      EXPECT_FALSE(fs::exists(dir_ / "way.partial"));
    }
    fs::remove_all(dir_ / "way");
    fs::remove_all(dir_ / "back");
  }
  EXPECT_THAT(convert("dcp", "out").err,
              AllOf(HasSubstr("2 weights cannot be loaded without"), HasSubstr("the __metadata__ of"),
                    HasSubstr("choose a format with safetensors files")));
  EXPECT_EQ(convert("ranks", "out", {"--shard-format", "bin"}).exit_code, 4);
}

TEST_F(HeaderMetadata, ThatDoesNotDescribeWhatItListsIsCorrupt) {
  dir_.write("source/model-00002-of-00002.safetensors",
             file_of({{"wo._weight_qdata", DType::kInt8, {64, 64}}}, {{"tensor_names", R"(["wo.weight"])"}}));
  const CommandResult r = convert("hf", "out");
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, HasSubstr("tensor_names lists 'wo.weight', but has no entry for it"));
}

// A trainer's notes that cannot be stored are left out with a warning, not refused.
TEST(HeaderNotes, AreCarriedAndNamedIfTheyCannotBe) {
  const TempDir dir;
  dir.write("a/model.safetensors",
            file_of({{"lora.weight", DType::kFloat16, {8, 8}}}, {{"format", "mlx"}, {"ss_steps", "100"}}));
  ASSERT_EQ(reshard_cli({"convert", dir / "a", dir / "hf", "--to", "hf", "-q"}).exit_code, 0);
  EXPECT_EQ(metadata_of(dir / "hf/model.safetensors"), (Entries{{"format", "pt"}, {"ss_steps", "100"}}));
  const CommandResult r = reshard_cli({"convert", dir / "a", dir / "dcp", "--to", "dcp"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out + r.err, HasSubstr("'ss_steps'"));
}

// The names that safetensors' save_model leaves out become tensors of the copy, not metadata.
TEST(HeaderNotes, NamesOfOneTensorAreNone) {
  const TempDir dir;
  dir.write("a/model.safetensors",
            file_of({{"embed.weight", DType::kFloat16, {8, 8}}}, {{"head.weight", "embed.weight"}}));
  ASSERT_EQ(reshard_cli({"convert", dir / "a", dir / "hf", "--to", "hf", "--family", "none", "-q"}).exit_code, 0);
  EXPECT_EQ(metadata_of(dir / "hf/model.safetensors"), (Entries{{"format", "pt"}}));
}

}  // namespace
}  // namespace reshard::header_metadata_test
