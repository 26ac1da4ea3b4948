// Tests LoRA adapters stored next to their weights, as Accelerate saves PEFT models (tests/data/lora: FSDP2 on two
// ranks, bfloat16 weights, float32 adapters of rank 4 and alpha 8).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/model/parts.h"
#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::cli_adapter_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class AdapterTest : public testing::Test {
 protected:
  AdapterTest() { fs::copy(test_data("lora"), source_, fs::copy_options::recursive); }

  CommandResult convert(std::vector<std::string> more, const std::string& to = "hf") {
    std::vector<std::string> all = {"convert", source_, dir_ / "out", "--to", to, "-q"};
    all.insert(all.end(), more.begin(), more.end());
    return reshard_cli(all);
  }
  void set_config(const std::string& text) { write_file(source_ + "/adapter_config.json", text); }

  const TempDir dir_;
  const std::string source_ = dir_ / "source";
};

TEST_F(AdapterTest, TheBaseAndTheAdapterAreWrittenApart) {
  const CommandResult r = convert({});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const TensorValues base = load_checkpoint(dir_ / "out");
  EXPECT_EQ(base.size(), 21U);
  EXPECT_TRUE(base.contains("model.layers.1.self_attn.q_proj.weight"));
  EXPECT_EQ(load_checkpoint(dir_ / "out/adapter/adapter_model.safetensors"),
            load_checkpoint(test_data("lora.adapter.safetensors")));
  EXPECT_EQ(*read_whole_file(dir_ / "out/adapter/adapter_config.json", 1 << 20),
            *read_whole_file(source_ + "/adapter_config.json", 1 << 20));
  const CommandResult verified = reshard_cli({"verify", dir_ / "out", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out;
  const CommandResult again = convert({"--force"});
  EXPECT_EQ(again.exit_code, 0) << again.err;
}

TEST_F(AdapterTest, IsMergedIntoATrainingStateUnderNamesThatItKnows) {
  const CommandResult refused = convert({"--merge-adapter"}, "dcp");
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("add --names hf for the names that adapters use"));
  const CommandResult r = convert({"--merge-adapter", "--names", "hf"}, "dcp");
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "out")), read_digests(test_data("lora.merged.json")));
}

// PEFT 0.21's own files. A prompt replaces no weight, so it has no matrices.
TEST(Adapter, APromptIsDescribedAndComparedWithItsConfig) {
  for (const auto& [name, shown, shape] :
       {std::tuple("prompt_tuning", "PEFT's PROMPT_TUNING, 8 virtual tokens; base model: not recorded", "[8, 64]"),
        std::tuple("prefix_tuning", "PEFT's PREFIX_TUNING, 8 virtual tokens; base model: not recorded", "[8, 192]")}) {
    const TempDir dir;
    const std::string adapter = dir / "adapter";
    fs::copy(test_data(name), adapter);
    EXPECT_THAT(reshard_cli({"inspect", adapter}).out, HasSubstr("adapter     " + std::string(shown)));
    EXPECT_EQ(reshard_cli({"verify", adapter, "--fail-on", "note"}).exit_code, 0) << name;
    std::string config = read_file(adapter + "/adapter_config.json");
    const std::string tokens = "\"num_virtual_tokens\": ";
    ASSERT_NE(config.find(tokens + "8"), std::string::npos);
    config.replace(config.find(tokens + "8"), tokens.size() + 1, tokens + "9");
    write_file(adapter + "/adapter_config.json", config);
    const CommandResult verified = reshard_cli({"verify", adapter, "--json"});
    EXPECT_EQ(verified.exit_code, 1);
    EXPECT_THAT(verified.out,
                testing::AllOf(HasSubstr("adapter-prompt"), HasSubstr("shape " + std::string(shape) + "; "),
                               HasSubstr("adapter_config.json expects [9, ")));
  }
}

TEST_F(AdapterTest, AloneItIsNoModel) {
  ASSERT_EQ(convert({}).exit_code, 0);
  const std::string adapter = dir_ / "out/adapter";
  const auto shown = [&](const std::string& config) {
    if (!config.empty()) write_file(adapter + "/adapter_config.json", config);
    return reshard_cli({"inspect", adapter}).out;
  };
  EXPECT_THAT(shown(""), HasSubstr("adapter     LoRA, rank 4, alpha 8, "));
  EXPECT_THAT(shown(R"({"r": 4, "lora_alpha": 8, "base_model_name_or_path": "org/\u001b[31m"})"),
              HasSubstr("; base model: org/\\x1b[31m"));
  EXPECT_THAT(shown(R"({"r": 4, "lora_alpha": 8})"), HasSubstr("; base model: not recorded"));
  EXPECT_THAT(shown(R"({"r": 4, "lora_alpha": 8, "use_dora": true, "use_rslora": true, "alpha_pattern": {"x": 2}})"),
              HasSubstr("adapter     DoRA, rank 4, alpha 8 (others in alpha_pattern), rsLoRA, "));
  fs::remove(adapter + "/adapter_config.json");
  EXPECT_THAT(shown(""), HasSubstr("no adapter_config.json gives its alpha and base model"));
  for (const std::vector<std::string>& more : {std::vector<std::string>{}, {"--merge-adapter"}}) {
    std::vector<std::string> words = {"convert", adapter, dir_ / "alone", "--to", "hf"};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult r = reshard_cli(words);
    EXPECT_EQ(r.exit_code, 4);
    EXPECT_THAT(r.err, HasSubstr("it contains only adapters ("));
    EXPECT_THAT(r.err, HasSubstr("To merge them, convert the model that they change, with --merge-adapter --adapter " +
                                 adapter + "."));
    EXPECT_THAT(r.err, Not(HasSubstr("--strip-prefix")));
  }
}

TEST_F(AdapterTest, ALostMatrixOfAPairIsAnError) {
  ASSERT_EQ(convert({}).exit_code, 0);
  EXPECT_EQ(reshard_cli({"verify", dir_ / "out/adapter"}).exit_code, 0);
  const std::string lost = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight";
  ASSERT_EQ(reshard_cli({"convert", dir_ / "out/adapter", dir_ / "damaged", "--to", "hf", "-q", "--family", "none",
                         "--exclude", lost})
                .exit_code,
            0);
  const CommandResult r = reshard_cli({"verify", dir_ / "damaged"});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_THAT(r.out, HasSubstr("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight: the other matrix of "
                               "the pair"));
  EXPECT_THAT(r.out, HasSubstr("1 error, 0 warnings, 0 notes"));
}

TEST_F(AdapterTest, IsMergedAsPeftMergesIt) {
  const CommandResult r = convert({"--merge-adapter"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "out")), read_digests(test_data("lora.merged.json")));
  EXPECT_FALSE(fs::exists(dir_ / "out/adapter"));
}

TEST_F(AdapterTest, WhatWasWrittenApartIsMergedLater) {
  ASSERT_EQ(convert({}).exit_code, 0);
  const CommandResult r = reshard_cli({"convert", dir_ / "out", dir_ / "merged", "--to", "hf", "-q", "--merge-adapter",
                                       "--adapter", dir_ / "out/adapter"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "merged")), read_digests(test_data("lora.merged.json")));
}

TEST_F(AdapterTest, WhatWasWrittenApartByTorchSaveIsMergedLater) {
  ASSERT_EQ(convert({}, "bin").exit_code, 0);
  const CommandResult r = reshard_cli({"convert", dir_ / "out", dir_ / "merged", "--to", "hf", "-q", "--merge-adapter",
                                       "--adapter", dir_ / "out/adapter"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "merged")), read_digests(test_data("lora.merged.json")));
}

TEST_F(AdapterTest, StaysBesideTheWeightsInATrainingState) {
  const CommandResult r = convert({"--names", "hf", "--mesh", "dp_shard=3"}, "dcp");
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const CommandResult again =
      reshard_cli({"convert", dir_ / "out", dir_ / "merged", "--to", "hf", "-q", "--merge-adapter", "--lora-alpha", "8",
                   "--config", source_ + "/config.json"});
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "merged")), read_digests(test_data("lora.merged.json")));
}

TEST_F(AdapterTest, ItsConfigIsMadeWhereThereIsNone) {
  fs::remove(source_ + "/adapter_config.json");
  const CommandResult refused = convert({});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("its adapter has rank 4, but no adapter_config.json next to it gives the alpha"));
  ASSERT_EQ(convert({"--lora-alpha", "8"}).exit_code, 0);
  const auto text = read_whole_file(dir_ / "out/adapter/adapter_config.json", 1 << 20);
  const auto json = parse_json(*text, "adapter_config.json");
  EXPECT_EQ(*json->get_index("r"), 4);
  EXPECT_EQ(*json->find("lora_alpha")->as_double(), 8.0);
  std::vector<std::string> targets;
  const auto listed = json->get_array("target_modules");
  ASSERT_TRUE(listed);
  for (const Json& target : *listed) targets.emplace_back(*target.as_string());
  EXPECT_THAT(targets, testing::ElementsAre("down_proj", "q_proj", "v_proj"));
}

TEST_F(AdapterTest, ARankThatTheMatricesDenyIsNamed) {
  set_config(R"({"r": 8, "lora_alpha": 8})");
  for (const std::vector<std::string>& how : {std::vector<std::string>(), {"--merge-adapter"}}) {
    const CommandResult r = convert(how);
    EXPECT_EQ(r.exit_code, 3);
    EXPECT_THAT(r.err,
                HasSubstr("adapter_config.json: r 8: the matrices of 'model.layers.0.mlp.down_proj' have rank 4"));
  }
}

TEST_F(AdapterTest, AnAdapterOfAnotherModelIsNamed) {
  ASSERT_EQ(convert({}).exit_code, 0);
  const CommandResult r = reshard_cli({"convert", test_data("moe/qwen3_5_moe"), dir_ / "merged", "--to", "hf", "-q",
                                       "--merge-adapter", "--adapter", dir_ / "out/adapter"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, HasSubstr("an adapter of another model"));
  EXPECT_FALSE(fs::exists(dir_ / "merged"));
}

TEST_F(AdapterTest, KindsThatCannotBeMergedAreNamed) {
  const std::vector<std::pair<std::string, std::string>> rows = {{"use_dora", "true"},
                                                                 {"fan_in_fan_out", "true"},
                                                                 {"lora_bias", "true"},
                                                                 {"use_bdlora", R"({"nblocks": 2})"},
                                                                 {"kasa_config", R"({"beta": 0.1})"},
                                                                 {"arrow_config", R"({"top_k": 3})"},
                                                                 {"alora_invocation_tokens", "[7, 8]"},
                                                                 {"layer_replication", "[[0, 2], [1, 2]]"}};
  std::string unset;
  for (const auto& [kind, value] : rows) {
    set_config(R"({"r": 4, "lora_alpha": 8, ")" + kind + R"(": )" + value + "}");
    unset += ", \"" + kind + "\": " + (value == "true" ? "false" : value.front() == '[' ? "[]" : "null");
    const CommandResult r = convert({"--merge-adapter"});
    EXPECT_EQ(r.exit_code, 4) << kind;
    EXPECT_THAT(r.err, AnyOf(HasSubstr(kind + ": merging adapters of this kind is not supported"),
                             HasSubstr(kind + ": an adapter of this kind cannot be merged")));
  }
  // What only changes how the matrices are trained.
  set_config(R"({"r": 4, "lora_alpha": 8, "init_lora_weights": "mica", "velora_config": {"scale": 1}, )"
             R"("monteclora_config": {"num_samples": 4})" +
             unset + "}");
  EXPECT_EQ(convert({"--merge-adapter"}).exit_code, 0);
}

TEST_F(AdapterTest, IsToldOfByVerify) {
  const CommandResult r = reshard_cli({"verify", source_});
  EXPECT_THAT(r.out, HasSubstr("12 tensors of adapters, 21 of the model"));
  EXPECT_THAT(r.out, testing::Not(HasSubstr("name-unknown")));
}

TEST_F(AdapterTest, NothingToMergeIsAUsageError) {
  const CommandResult r =
      reshard_cli({"convert", test_data("moe/qwen3_5_moe"), dir_ / "merged", "--to", "hf", "-q", "--merge-adapter"});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_THAT(r.err, HasSubstr("no adapter found"));
}

// LoRA on fused experts (tests/data/lora_experts/make.py): adapters of gate_up_proj, down_proj (with another rank) and
// q_proj; and gpt-oss, whose square matrices do not show which dimension is the input.
class ExpertAdapterTest : public testing::TestWithParam<std::string> {
 protected:
  std::string data(const std::string& name) const { return test_data("lora_experts/" + GetParam() + "/" + name); }
  CommandResult convert(const std::string& source, const std::string& out, std::vector<std::string> more) {
    more.insert(more.begin(), {"convert", source, dir_ / out, "--to", "hf", "-q"});
    return reshard_cli(more);
  }
  void expect_merged(const CommandResult& r, const std::string& out) {
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_EQ(digests_of(load_checkpoint(dir_ / out)), read_digests(data("merged.json")));
  }

  const TempDir dir_;
};

TEST_P(ExpertAdapterTest, IsMergedAsPeftMergesIt) {
  expect_merged(convert(data("base"), "from_base", {"--merge-adapter", "--adapter", data("adapter")}), "from_base");
  fs::copy(data("state"), dir_ / "state", fs::copy_options::recursive);
  fs::copy(data("adapter") + "/adapter_config.json", dir_ / "state/adapter_config.json");
  expect_merged(convert(dir_ / "state", "from_state", {"--merge-adapter"}), "from_state");
}

TEST_P(ExpertAdapterTest, IsWrittenAsPeftWritesIt) {
  const CommandResult r = convert(data("state"), "out", {"--lora-alpha", "6"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(load_checkpoint(dir_ / "out"), load_checkpoint(data("base")));
  EXPECT_EQ(load_checkpoint(dir_ / "out/adapter/adapter_model.safetensors"),
            load_checkpoint(data("adapter") + "/adapter_model.safetensors"));
  const auto config = parse_json(read_file(dir_ / "out/adapter/adapter_config.json"), "config");
  std::vector<std::string> parameters;
  const auto names = config->get_array("target_parameters");
  for (const Json& name : *names) parameters.emplace_back(*name.as_string());
  EXPECT_THAT(parameters, testing::Contains("mlp.experts.down_proj"));
  EXPECT_EQ(*config->get_index("r"), 2);
  expect_merged(convert(dir_ / "out", "merged", {"--merge-adapter", "--adapter", dir_ / "out/adapter"}), "merged");
}

TEST_P(ExpertAdapterTest, ThatFitsNoParameterIsRefused) {
  fs::copy(data("adapter"), dir_ / "adapter", fs::copy_options::recursive);
  std::string config = read_file(dir_ / "adapter/adapter_config.json");
  for (std::size_t at; (at = config.find("experts.down_proj\"")) != std::string::npos;)
    config.replace(at, 17, "experts.other");
  write_file(dir_ / "adapter/adapter_config.json", config);
  const CommandResult r = convert(data("base"), "out", {"--merge-adapter", "--adapter", dir_ / "adapter"});
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_THAT(r.err, HasSubstr("fits no parameter of the module"));
}

INSTANTIATE_TEST_SUITE_P(Experts, ExpertAdapterTest, testing::Values("qwen", "oss"),
                         [](const auto& experts) { return experts.param; });

// PEFT saves a tied head and its embedding under two names (tests/data/lora_tied/make.py).
TEST(Adapter, OfATiedHeadIsMergedIfItIsThatOfTheEmbedding) {
  const TempDir dir;
  const auto merge = [&](const std::string& adapter) {
    return reshard_cli({"convert", test_data("lora_tied/base"), dir / adapter, "--to", "hf", "-q", "--merge-adapter",
                        "--adapter", test_data("lora_tied/" + adapter)});
  };
  const CommandResult alike = merge("alike");
  ASSERT_EQ(alike.exit_code, 0) << alike.err;
  EXPECT_EQ(digests_of(load_checkpoint(dir / "alike")), read_digests(test_data("lora_tied/merged.json")));
  const CommandResult apart = merge("apart");
  EXPECT_EQ(apart.exit_code, 4);
  EXPECT_THAT(apart.err, HasSubstr("tensor 'base_model.model.model.embed_tokens.weight' and tensor "
                                   "'base_model.model.lm_head.weight' differ in [0:24, 0:16]: embedding and head of "
                                   "the model are tied"));
  EXPECT_FALSE(fs::exists(dir / "apart"));
}

TEST_F(AdapterTest, AnAlphaOfZeroIsNotedAndMayBeGiven) {
  set_config(R"({"r": 4, "lora_alpha": 0})");  // as verl writes it, for its users to correct
  const CommandResult base = reshard_cli({"convert", source_, dir_ / "base", "--to", "hf", "--merge-adapter"});
  EXPECT_EQ(base.exit_code, 0);
  EXPECT_THAT(base.out + base.err, HasSubstr("lora_alpha is 0, so the adapter changes nothing"));
  const CommandResult r = convert({"--merge-adapter", "--lora-alpha", "8", "--force"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "out")), read_digests(test_data("lora.merged.json")));
}

// Of an adapter written next to the model, and merged.
TEST_F(AdapterTest, ModulesWhoseAlphaIsZeroAreNoted) {
  const std::string some = "_pattern is 0, so the adapter changes nothing in ";
  struct Case {
    std::string config;
    std::vector<std::string> notes;
  };
  const std::vector<Case> cases = {
      {R"({"r": 4, "lora_alpha": 8, "alpha_pattern": {"q_proj": 0}})",
       {"alpha" + some +
        "2 of 6 modules: 'model.layers.0.self_attn.q_proj', 'model.layers.1.self_attn.q_proj'; correct"}},
      {R"({"r": 4, "lora_alpha": 8, "alpha_pattern": {"layers.1.mlp.down_proj": 0, "down_proj": 4}})",
       {"alpha" + some + "1 of 6 modules: 'model.layers.1.mlp.down_proj'; correct"}},
      {R"({"r": 4, "lora_alpha": 8, "alpha_pattern": {".*": 0}})",
       {"alpha_pattern is 0, so the adapter changes nothing; correct"}},
      {R"({"r": 4, "lora_alpha": 0, "alpha_pattern": {"q_proj": 8, "v_proj": 0}})",
       {"lora_alpha is 0, so the adapter changes nothing in 2 of 6 modules: 'model.layers.0.mlp.down_proj', "
        "'model.layers.1.mlp.down_proj'; give the alpha",
        "alpha" + some + "2 of 6 modules: 'model.layers.0.self_attn.v_proj'"}},
      {R"({"r": 4, "lora_alpha": 0, "alpha_pattern": {".*": 8}})", {}},
      {R"({"r": 4, "lora_alpha": 8, "alpha_pattern": {"k_proj": 0}})", {}}};
  for (const Case& c : cases)
    for (const bool merges : {false, true}) {
      SCOPED_TRACE(c.config + (merges ? " merged" : ""));
      set_config(c.config);
      std::vector<std::string> words = {"convert", source_, dir_ / "out", "--to", "hf", "--force"};
      if (merges) words.emplace_back("--merge-adapter");
      const CommandResult r = reshard_cli(words);
      ASSERT_EQ(r.exit_code, 0) << r.err;
      const std::string said = r.out + r.err;
      for (const std::string& note : c.notes) EXPECT_THAT(said, HasSubstr(note));
      if (c.notes.empty()) {
        EXPECT_THAT(said, testing::Not(HasSubstr("is 0, so")));
      }
    }
}

TEST_F(AdapterTest, ModulesThatTargetModulesLeavesOutAreNoted) {
  struct Case {
    std::string names, note;
  };
  const std::vector<Case> cases = {
      {R"(["q_proj", "v_proj"])", "does not name 2 of 6 modules: 'model.layers.0.mlp.down_proj', "},
      {R"(["q_proj", "v_proj", "model.layers.0.mlp.down_proj"])", "does not name 1 of 6 modules: 'model.layers.1.mlp."},
      {R"(["q_proj", "v_proj", "roj", "down_proj"])", ""},
      {R"(["linear_qkv"])", ""},  // another trainer's names
      {R"("all-linear")", ""}};
  for (const Case& c : cases)
    for (const bool merges : {false, true}) {
      SCOPED_TRACE(c.names + (merges ? " merged" : ""));
      set_config(R"({"r": 4, "lora_alpha": 8, "target_modules": )" + c.names + "}");
      std::vector<std::string> words = {"convert", source_, dir_ / "out", "--to", "hf", "--force"};
      if (merges) words.emplace_back("--merge-adapter");
      const CommandResult r = reshard_cli(words);
      ASSERT_EQ(r.exit_code, 0) << r.err;
      const std::string said = r.out + r.err;
      if (c.note.empty()) {
        EXPECT_THAT(said, testing::Not(HasSubstr("does not name")));
      } else {
        EXPECT_THAT(said, HasSubstr("target_modules " + c.note));
      }
    }
}

// verl notes the alpha next to the files of its ranks, without a PEFT config.
TEST_F(AdapterTest, ItsAlphaIsFoundInVerlsNote) {
  fs::remove(source_ + "/adapter_config.json");
  write_file(source_ + "/lora_train_meta.json", R"({"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"})");
  const CommandResult inspected = reshard_cli({"inspect", source_});
  EXPECT_THAT(inspected.out, HasSubstr("LoRA, rank 4, 6 modules, alpha 8.0; base model: not recorded"))
      << inspected.err;
  const CommandResult r = convert({"--merge-adapter"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "out")), read_digests(test_data("lora.merged.json")));
  const CommandResult given = convert({"--merge-adapter", "--force", "--lora-alpha", "4"});
  EXPECT_EQ(given.exit_code, 2);
  EXPECT_THAT(given.err, HasSubstr("lora_train_meta.json: lora_alpha differs from --lora-alpha"));
  write_file(source_ + "/lora_train_meta.json", R"({"r": 4, "lora_alpha": "8"})");
  const CommandResult wrong = convert({"--merge-adapter", "--force"});
  EXPECT_EQ(wrong.exit_code, 3);
  EXPECT_THAT(wrong.err, HasSubstr("lora_train_meta.json: lora_alpha"));
}

// Returns a safetensors file with an entry of __metadata__ added, which its header must lack.
std::string with_header_entry(const std::string& file, const std::string& key, const std::string& value) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  std::string header = file.substr(sizeof length, length);
  EXPECT_THAT(header, Not(HasSubstr("__metadata__")));
  Json entry = Json::object();
  header.insert(1, "\"__metadata__\":" + to_text(entry.set(key, value)) + ",");
  const std::uint64_t longer = header.size();
  return std::string(reinterpret_cast<const char*>(&longer), sizeof longer) + header +
         file.substr(sizeof length + length);
}

// diffusers stores the config in the file of the matrices, a pipeline's under the model's name.
TEST_F(AdapterTest, ItsConfigIsFoundInTheHeader) {
  ASSERT_EQ(convert({}).exit_code, 0);
  const std::string adapter = dir_ / "adapter", matrices = read_file(test_data("lora.adapter.safetensors"));
  fs::create_directory(adapter);
  const auto merge = [&](const std::string& config) {
    write_file(adapter + "/adapter_model.safetensors", with_header_entry(matrices, "lora_adapter_metadata", config));
    fs::remove_all(dir_ / "merged");
    return reshard_cli(
        {"convert", dir_ / "out", dir_ / "merged", "--to", "hf", "-q", "--merge-adapter", "--adapter", adapter});
  };
  for (const char* config : {R"({"r": 4, "lora_alpha": 8})", R"({"base_model.r": 4, "base_model.lora_alpha": 8})"}) {
    const CommandResult r = merge(config);
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_EQ(digests_of(load_checkpoint(dir_ / "merged")), read_digests(test_data("lora.merged.json"))) << config;
    EXPECT_THAT(reshard_cli({"inspect", adapter}).out, HasSubstr("LoRA, rank 4, alpha 8, "));
  }
  const CommandResult other = merge(R"({"unet.r": 4, "unet.lora_alpha": 8})");
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_THAT(other.err, HasSubstr("no adapter_config.json next to it gives the alpha; add --lora-alpha"));
  const CommandResult wrong = merge(R"({"r": 4, "lora_alpha": "8"})");
  EXPECT_EQ(wrong.exit_code, 3);
  EXPECT_THAT(wrong.err, HasSubstr("__metadata__: lora_adapter_metadata: lora_alpha"));
}

// ZeRO 3 stores float32 masters of the matrices, which the model has in bfloat16. Trainer saved them as such, too.
TEST(ZeroAdapter, IsMergedInTheDtypeOfTheModel) {
  const TempDir dir;
  const std::string data = test_data("deepspeed/z3_lora"), adapter = dir / "adapter";
  fs::create_directory(adapter);
  for (const char* file : {"adapter_config.json", "adapter_model.safetensors"})
    fs::copy_file(data + "/saved/" + file, adapter + "/" + file);
  const auto merged = [&](const std::string& from, const std::string& to) {
    EXPECT_EQ(reshard_cli({"convert", data + "/base", to, "--to", "hf", "-q", "--merge-adapter", "--adapter", from})
                  .exit_code,
              0);
    return load_checkpoint(to);
  };
  EXPECT_TRUE(merged(data + "/saved", dir / "a") == merged(adapter, dir / "b"));
}

TEST(MegatronAdapter, HasItsOwnNames) {
  EXPECT_TRUE(is_adapter("decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight"));
  EXPECT_TRUE(is_adapter("decoder.layers.0.mlp.linear_fc1.adapter.adapter_gate.linear_out.weight"));
  EXPECT_FALSE(is_adapter("speech_encoder.adapter.layers.0.self_attn.linear_out.weight"));  // SeamlessM4T
  EXPECT_FALSE(is_adapter("x.adapter.adapter_q"));
}

// Megatron Bridge and NeMo train adapters inside Megatron core's modules, under names of their own. A converted model
// without them would be the one before its fine-tuning.
TEST(MegatronAdapter, IsNotLeftOutUnnoticed) {
  const TempDir dir;
  ASSERT_EQ(reshard_cli({"convert", sample("tp8") + "/checkpoint", dir / "hf", "--to", "hf", "-q"}).exit_code, 0);
  ASSERT_EQ(reshard_cli({"convert", dir / "hf", dir / "core", "--to", "dcp", "--names", "megatron", "-q"}).exit_code,
            0);
  TensorValues whole = load_checkpoint(dir / "core"), alone;
  for (const std::string module : {"linear_qkv.adapter.", "linear_qkv.adapter.adapter_q.", "linear_proj.adapter."})
    for (const std::string part : {"linear_in", "linear_out"})
      alone["decoder.layers.0.self_attention." + module + part + ".weight"] = {
          DType::kBFloat16, part == "linear_in" ? Dims{2, 8} : Dims{8, 2}, std::string(32, '\x3f')};
  whole.insert(alone.begin(), alone.end());
  for (const auto& [name, values] : {std::pair("whole", whole), {"alone", alone}}) {
    write_dcp(values, dir / name, Mesh({{"dp_shard", 2}}));
    fs::copy_file(dir / "hf/config.json", dir / (std::string(name) + "/config.json"));
  }
  const CommandResult r = reshard_cli({"convert", dir / "whole", dir / "out", "--to", "hf"});
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_THAT(r.err, HasSubstr("6 tensors of adapters next to the weights that they change"));
  EXPECT_THAT(r.err, Not(HasSubstr("--keep-unknown")));
  const CommandResult verified = reshard_cli({"verify", dir / "whole"});
  EXPECT_EQ(verified.exit_code, 1);
  EXPECT_THAT(verified.out, HasSubstr("6 tensors of adapters, 27 of the model"));
  EXPECT_THAT(verified.out, Not(HasSubstr("A misspelt name")));
  EXPECT_EQ(reshard_cli({"convert", dir / "whole", dir / "out", "--to", "hf", "--exclude", "*.adapter.*"}).exit_code,
            0);

  const CommandResult only = reshard_cli({"convert", dir / "alone", dir / "out2", "--to", "hf"});
  EXPECT_EQ(only.exit_code, 4);
  EXPECT_THAT(only.err, HasSubstr("it contains only adapters of Megatron Bridge or NeMo"));
  alone.erase("decoder.layers.0.self_attention.linear_proj.adapter.linear_out.weight");
  write_dcp(alone, dir / "lost", Mesh());
  EXPECT_THAT(reshard_cli({"verify", dir / "lost"}).out, HasSubstr("the other matrix of the pair"));
}

// PEFT's other kinds have no words of their own in common but the prefix.
TEST(OtherAdapters, AreNotWrittenAsModels) {
  const TensorValue value = {DType::kFloat32, {2}, std::string(8, 'a')};
  for (const TensorValues& adapter :
       {TensorValues{{"base_model.model.model.layers.0.self_attn.q_proj.oft_R.weight", value},
                     {"base_model.model.model.layers.1.self_attn.q_proj.oft_R.weight", value}},
        TensorValues{{"prompt_embeddings", value}}}) {
    const TempDir dir;
    write_dcp(adapter, dir / "saved", Mesh());
    const std::vector<std::string> convert = {"convert", dir / "saved", dir / "adapter", "--to", "hf"};
    ASSERT_EQ(reshard_cli(convert, {"--family", "none"}).exit_code, 0);
    const CommandResult r = reshard_cli({"convert", dir / "adapter", dir / "out", "--to", "hf"});
    EXPECT_EQ(r.exit_code, 4);
    EXPECT_THAT(r.err, HasSubstr("it contains only an adapter of PEFT ("));
  }
}

TEST_F(AdapterTest, ItsConfigIsFoundWhereTrainersPutIt) {
  for (const char* place : {"lora_adapter", "adapter", "default", "policy_lora"}) {
    SCOPED_TRACE(place);
    fs::create_directory(source_ + "/" + place);
    fs::rename(source_ + "/adapter_config.json", source_ + "/" + place + "/adapter_config.json");
    const CommandResult r = convert({"--merge-adapter", "--force"});
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_EQ(digests_of(load_checkpoint(dir_ / "out")), read_digests(test_data("lora.merged.json")));
    fs::rename(source_ + "/" + place + "/adapter_config.json", source_ + "/adapter_config.json");
    fs::remove_all(source_ + "/" + place);
  }
  // Two directories of unknown names may describe two adapters: none is chosen.
  for (const char* place : {"one", "other"}) {
    fs::create_directory(source_ + "/" + place);
    fs::copy(source_ + "/adapter_config.json", source_ + "/" + place + "/adapter_config.json");
  }
  fs::remove(source_ + "/adapter_config.json");
  const CommandResult r = convert({"--merge-adapter", "--force"});
  EXPECT_EQ(r.exit_code, 2) << r.out;
  EXPECT_THAT(r.err, testing::HasSubstr("--lora-alpha"));
}

}  // namespace
}  // namespace reshard::cli_adapter_test
