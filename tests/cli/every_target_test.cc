// verify finds nothing wrong with reshard's own output: every target in the registry, every sample and family.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cctype>
#include <filesystem>
#include <numeric>

#include "formats/open.h"
#include "lib/audit/verification.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

using testing::ElementsAre;

std::vector<const Format*> targets() {
  std::vector<const Format*> out;
  for (const Format* format : formats())
    if (format->lay_out) out.push_back(format);
  return out;
}

std::string identifier(std::string name) {
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

// Small models of the families whose tensors are fused, stacked, tied, biased or quantised.
const std::pair<const char*, const char*> kModels[] = {
    {"gpt2", R"({"model_type": "gpt2", "vocab_size": 50, "n_positions": 16, "n_embd": 8, "n_head": 2, "n_layer": 2})"},
    {"bloom", R"({"model_type": "bloom", "vocab_size": 64, "hidden_size": 16, "n_head": 4, "n_layer": 2})"},
    {"tied_qwen2", R"({"model_type": "qwen2", "vocab_size": 100, "hidden_size": 16, "intermediate_size": 32,
      "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true})"},
    {"qwen3_moe", R"({"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
      "moe_intermediate_size": 8, "num_experts": 4, "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 4})"},
    {"mixtral", R"({"model_type": "mixtral", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
      "num_local_experts": 4, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})"},
    {"gemma2", R"({"model_type": "gemma2", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
      "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4})"}};

struct Source {
  std::string name, path, config;
};

class EveryTarget : public testing::TestWithParam<const Format*> {
 protected:
  void SetUp() override {
    for (const char* name : {"tp8", "pp2_tp4", "fsdp2_tp2_optim", "hsdp2x4"})
      sources_.push_back({name, sample(name) + "/checkpoint", sample(name) + "/config.json"});
    sources_.push_back(
        {"colossalai", sample("colossalai") + "/healthy_st/epoch-0_step-7", sample("colossalai") + "/config.json"});
  }

  // Makes one of kModels.
  Source make(const std::string& name, const char* config) {
    const std::string directory = dir_ / (name + ".source"), path = directory + ".json";
    if (!std::filesystem::exists(path)) {
      write_file(path, config);
      const CommandResult r = reshard_cli({"synth", directory, "--config", path, "--to", "hf", "-q"});
      EXPECT_EQ(r.exit_code, 0) << r.err;
    }
    return {name, directory, path};
  }

  static const Format& format() { return *GetParam(); }

  // Converts the source to this target. Returns nothing if the target refuses the model or mesh with an error.
  std::string convert(const Source& source, const std::string& mesh, const std::string& names = "") {
    const std::string path = dir_ / (source.name + "." + std::to_string(count_++));
    std::vector<std::string> args = {"convert", source.path, path,         "--to", std::string(format().name),
                                     "-q",      "--config",  source.config};
    if (!mesh.empty()) args.insert(args.end(), {"--mesh", mesh});
    if (!names.empty()) args.insert(args.end(), {"--names", names});
    const CommandResult r = reshard_cli(args);
    if (r.exit_code == 0) return path;
    EXPECT_EQ(r.exit_code, 4) << testing::PrintToString(args) << r.err;  // unsupported
    return "";
  }

  static VerifyOptions all_of(const std::string& path) {
    VerifyOptions options;
    options.path = path;
    options.bytes = options.replicas = true;
    options.run.memory = Index{2} << 30;
    options.run.threads = 2;
    return options;
  }

  // Returns the ids of the findings, or an error's message.
  static std::vector<std::string> found(const VerifyOptions& options) {
    const auto report = verify(open_checkpoint, options);
    if (!report) return {report.error().message()};
    EXPECT_GT(report->tensor_count, 0);
    std::vector<std::string> out;
    for (const Finding& f : report->findings)
      out.push_back(f.id + ": " + (f.tensors.empty() ? "" : f.tensors[0] + " ") + f.what);
    return out;
  }

  TempDir dir_;
  int count_ = 0;
  std::vector<Source> sources_;
};

TEST_P(EveryTarget, VerifiesClean) {
  std::vector<std::string> meshes = {""};
  if (format().takes_mesh()) meshes = {"tp=2", "pp=2", "dp_shard=3,tp=2", "dp_replicate=2,dp_shard=2"};
  const int models = static_cast<int>(std::size(kModels)), samples = static_cast<int>(sources_.size());
  const int step = every_nth(5);  // a different mesh each time
  int made = 0, n = 0;
  for (int i = 0; i < samples + models; ++i)
    for (const std::string& mesh : meshes) {
      if (n++ % step != 0) continue;
      const Source source = i < samples ? sources_[static_cast<std::size_t>(i)]
                                        : make(kModels[i - samples].first, kModels[i - samples].second);
      const std::string path = convert(source, mesh);
      if (path.empty()) continue;
      ++made;
      VerifyOptions options = all_of(path);
      EXPECT_THAT(found(options), ElementsAre()) << source.name << " " << mesh;
      options.config = source.config;
      EXPECT_THAT(found(options), ElementsAre()) << source.name << " " << mesh << " --config";
    }
  EXPECT_GE(made * step, 4);
}

TEST_P(EveryTarget, VerifiesCleanUnderEveryName) {
  for (const Source& source : {sources_[0], sources_[2]}) {
    if (every_nth(2) > 1 && source.name == "tp8") continue;
    for (const char* names : {"hf", "torchtitan", "torchtitan-2026", "megatron"}) {
      const std::string path = convert(source, "", names);
      if (path.empty()) continue;
      VerifyOptions options = all_of(path);
      options.config = source.config;
      EXPECT_THAT(found(options), ElementsAre()) << source.name << " " << names;
    }
  }
}

// The output of a part of a model can be opened; otherwise the target's error says that it needs whole models.
TEST_P(EveryTarget, OfAPartOfAModelIsOpenedAgainOrRefused) {
  const std::vector<std::vector<std::string>> selections = {
      {"--include", "*embed*"}, {"--include", "*layers.1.*"}, {"--include", "*wq*"}, {"--exclude", "*norm*"}};
  for (std::size_t i = 0; i < selections.size(); ++i) {
    const std::string path = dir_ / ("part" + std::to_string(i));
    std::vector<std::string> args = {"convert", sources_[0].path, path, "--to", std::string(format().name), "-q"};
    args.insert(args.end(), selections[i].begin(), selections[i].end());
    const CommandResult written = reshard_cli(args);
    if (written.exit_code != 0) {
      EXPECT_EQ(written.exit_code, 4) << i << ": " << written.err;
      EXPECT_FALSE(std::filesystem::exists(path));
      continue;
    }
    const CommandResult again = reshard_cli({"convert", path, path + ".dcp", "--to", "dcp", "-q", "--family", "none"});
    EXPECT_EQ(again.exit_code, 0) << i << ": " << again.err;
  }
}

// Damage is found by the format's own checksums or by the manifest.
TEST_P(EveryTarget, DamageIsSeenByWhoConvertsItFurther) {
  for (const Source& source : {sources_[0], sources_[2]}) {
    const std::string path = convert(source, "");
    if (path.empty()) continue;
    std::vector<std::pair<std::string, Index>> places;  // inside a tensor: file, offset
    {
      auto open = open_checkpoint(path);
      ASSERT_TRUE(open.has_value());
      const Catalog& catalog = open->reader->catalog();
      std::vector<std::size_t> all(catalog.tensors().size());
      std::iota(all.begin(), all.end(), std::size_t{0});
      ASSERT_TRUE(open->reader->locate(all, 1, "").has_value());
      for (std::size_t i = 0; i < all.size(); i += 11 * static_cast<std::size_t>(every_nth(4))) {
        const Fragment f = catalog.tensors()[i].fragments.get(0);
        places.emplace_back(catalog.file_path(f.extent.file), f.extent.offset + f.start + f.extent.length / 2);
      }
    }
    for (const auto& [file, offset] : places) {
      const std::string whole = read_file(file);
      std::string damaged = whole;
      damaged[static_cast<std::size_t>(offset)] ^= 0x10;
      write_file(file, damaged);
      const std::string out = dir_ / "further";
      for (const char* names : {"hf", "torchtitan"}) {  // the second has rows in another order
        const CommandResult r =
            reshard_cli({"convert", path, out, "--to", "dcp", "--names", names, "--config", source.config, "-q"});
        EXPECT_EQ(r.exit_code, 3) << file << "@" << offset << " " << names << r.err;
        EXPECT_FALSE(std::filesystem::exists(out));
        std::filesystem::remove_all(out);
      }
      write_file(file, whole);
    }
    const CommandResult sound =
        reshard_cli({"convert", path, dir_ / (source.name + ".sound"), "--to", "dcp", "--config", source.config});
    EXPECT_EQ(sound.exit_code, 0) << sound.err;
    EXPECT_THAT(sound.out, testing::AnyOf(testing::HasSubstr("source CRCs hold"),
                                          testing::HasSubstr("of the source's manifest verified")));
  }
}

TEST_P(EveryTarget, OfWholeTensorsSaysThatAMeshLeavesNoTrace) {
  if (!format().holds_whole_tensors()) GTEST_SKIP() << format().name << " follows the ranks";
  VerifyOptions options = all_of(convert(sources_[0], ""));
  options.mesh = *Mesh::parse("tp=8");
  const std::string read_as(open_checkpoint(options.path)->format->title);
  EXPECT_THAT(found(options), ElementsAre("layout-gathered-format: " + read_as +
                                          " files contain whole tensors, so they do not depend on the mesh"));
}

INSTANTIATE_TEST_SUITE_P(Formats, EveryTarget, testing::ValuesIn(targets()),
                         [](const auto& p) { return identifier(std::string(p.param->name)); });

}  // namespace
}  // namespace reshard
