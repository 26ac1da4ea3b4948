// Writes Megatron's files from a model, sharded and as files of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "formats/dcp/dcp.h"
#include "formats/encoding/tensor_file.h"
#include "formats/encoding/torch_archive.h"
#include "formats/megatron/arguments.h"
#include "formats/megatron/megatron.h"
#include "tests/formats/megatron/megatron_files.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"

namespace reshard::megatron_target_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class MegatronTarget : public MegatronFiles {};

// Returns the names and shapes of a DCP's tensors, and the names of its objects.
std::map<std::string, std::string> stored_in(const std::string& directory) {
  std::map<std::string, std::string> out;
  const auto reader = open_with(kDcpFormat, directory);
  EXPECT_TRUE(reader) << reader.error().message();
  for (const Tensor& t : (*reader)->catalog().tensors())
    if (!t.name.starts_with("optimizer")) out.emplace(t.name, to_string(t.shape));
  for (const Blob& blob : (*reader)->catalog().blobs)
    if (blob.name.find("_extra_state") != std::string::npos) out.emplace(blob.name, "object");
  return out;
}

// Expects that `out`, written from `model`, has the tensors of `source`, whose digests are next to it, and becomes
// `model` again. The config.json that is made from args is equivalent to the stored one.
void expect_read_back(const std::string& out, const std::string& source, const std::string& model) {
  SCOPED_TRACE(out);
  for (const std::string& other : {source, model}) {
    const CommandResult against = reshard_cli({"verify", out, "--against", other});
    EXPECT_EQ(against.exit_code, 0) << against.out << against.err;
  }
  fs::remove(out + "/config.json");
  ASSERT_EQ(reshard_cli({"convert", out, out + ".back", "--to", "hf", "-q"}).exit_code, 0);
  EXPECT_EQ(digests_of(load_checkpoint(out + ".back")), read_digests(source + ".hf.json"));
  EXPECT_EQ(read_file(out + ".back/config.json"), read_file(model + "/config.json"));
}

TEST_F(MegatronTarget, IsWrittenFromAModelAndReadAgain) {
  for (const std::string name : kReal) {
    const std::string source = test_data("megatron/" + name), model = dir_ / (name + ".hf"), out = dir_ / name;
    if (!fs::exists(source + ".hf.json")) continue;
    ASSERT_EQ(reshard_cli({"convert", source, model, "--to", "hf", "-q"}).exit_code, 0);
    const CommandResult r = reshard_cli({"convert", model, out, "--to", "megatron", "--mesh", "tp=2"});
    ASSERT_EQ(r.exit_code, 0) << name << r.err;
    const bool is_long = !name.starts_with("legacy");
    EXPECT_THAT(r.out, HasSubstr(is_long ? "255 rows (repeat-last) are added to the vocabulary of"
                                         : "221 rows (repeat-last) are added to the vocabulary of"));
    EXPECT_EQ(read_file(out + "/latest_checkpointed_iteration.txt"), "release");
    const CommandResult verified = reshard_cli({"verify", out, "--fail-on", "warning"});
    EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
    expect_read_back(out, source, model);
  }
}

// Names and shapes are Megatron's own, except for the rows that pad the vocabulary.
TEST_F(MegatronTarget, WritesWhatMegatronStores) {
  const std::string source = test_data("megatron/dist_tp2_dp2_dpreshardable"), out = dir_ / "out";
  ASSERT_EQ(reshard_cli({"convert", source, out, "--to", "megatron", "--vocab-divisible-by", "288", "-q"}).exit_code,
            0);
  const auto real = stored_in(source + kIteration), written = stored_in(out + kIteration);
  EXPECT_GT(real.size(), 12U);
  for (const auto& [name, shape] : real) EXPECT_EQ(written.contains(name) ? written.at(name) : "", shape) << name;
  for (const auto& [name, shape] : written) {
    EXPECT_TRUE(real.contains(name) || shape == "object") << name;
  }
}

TEST_F(MegatronTarget, ExpertsAreStackedAndTheirNormHasBothNames) {
  const std::string out = dir_ / "out";
  ASSERT_EQ(
      reshard_cli({"convert", test_data("megatron/legacy_tp2_ep2_moe_plain"), out, "--to", "megatron", "-q"}).exit_code,
      0);
  const auto written = stored_in(out + kIteration);
  const std::string layers = "decoder.layers.";
  const std::string fc1 = written.at(layers + "mlp.experts.experts.linear_fc1.weight");
  EXPECT_TRUE(fc1.starts_with("[2, 4, ")) << fc1;
  EXPECT_EQ(written.at(layers + "mlp.linear_fc1.layer_norm_weight"), written.at(layers + "pre_mlp_layernorm.weight"));
  EXPECT_TRUE(written.contains(layers + "mlp.experts.experts.linear_fc2._extra_state/shard_1.3_2.4"));
  const CommandResult shown = reshard_cli({"verify", out, "--replicas", "--fail-on", "warning"});
  EXPECT_EQ(shown.exit_code, 0) << shown.out;
}

// A fully_reshardable optimizer is a plain one, except for the names of the masters.
TEST_F(MegatronTarget, AnOptimizerLiesAsMegatronStoresIt) {
  const std::string source = test_data("megatron/dist_tp2_optim"), out = dir_ / "out";
  const CommandResult r =
      reshard_cli({"convert", source, out, "--to", "megatron", "--vocab-divisible-by", "144", "--mesh", "tp=2"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(read_file(out + "/latest_checkpointed_iteration.txt"), "10");
  const auto shapes = [](const std::string& path) {
    const auto reader = open_with(kDcpFormat, path);
    EXPECT_TRUE(reader);
    std::map<std::string, std::string> found;
    for (const Tensor& t : (*reader)->catalog().tensors())
      if (t.name.starts_with("optimizer")) found.emplace(t.name, to_string(t.shape));
    return found;
  };
  auto wanted = shapes(source + kIteration);
  std::map<std::string, std::string> renamed;
  for (const auto& [name, shape] : wanted) {
    std::string own = name;
    if (const std::size_t at = own.find(".fp32_param."); at != std::string::npos) own.replace(at, 12, ".param.");
    renamed.emplace(own, shape);
  }
  EXPECT_GT(renamed.size(), 20U);
  EXPECT_EQ(shapes(out + kIteration), renamed);

  const auto open = open_checkpoint(out);
  ASSERT_TRUE(open) << open.error().message();
  std::map<std::string, std::string> objects;
  for (const Blob& blob : open->reader->catalog().blobs) objects.emplace(blob.name, open->reader->describe(blob));
  for (const auto& [name, value] : std::map<std::string, std::string>{{"optimizer.param_groups.0.step", "1"},
                                                                      {"optimizer.param_groups.0.wd_mult", "1.0"},
                                                                      {"optimizer.param_groups.0.weight_decay", "0.1"},
                                                                      {"optimizer.param_groups.1.wd_mult", "0.0"},
                                                                      {"optimizer.param_groups.1.betas", "(0.9, 0.95)"},
                                                                      {"extra_state.iteration", "10"},
                                                                      {"extra_state.consumed_train_samples", "10"}})
    EXPECT_EQ(objects[name], value) << name;
  EXPECT_THAT(reshard_cli({"inspect", out}).out, HasSubstr("fully_reshardable"));
  // Converted back to Hugging Face names, with a step for each parameter, both are equal.
  for (const std::string& from : {source, out})
    ASSERT_EQ(
        reshard_cli({"convert", from, from == out ? dir_ / "a" : dir_ / "b", "--to", "dcp", "--names", "hf", "-q"})
            .exit_code,
        0);
  const TensorValues back = load_checkpoint(dir_ / "a");
  EXPECT_EQ(digests_of(back), digests_of(load_checkpoint(dir_ / "b")));
  EXPECT_TRUE(back.contains("optimizer.state.model.norm.weight.step"));
}

// The padding rows of masters are those of the weights, so that one is the other rounded. Moments have zeros there.
TEST_F(MegatronTarget, PaddingOfMastersIsThatOfWeights) {
  const std::string source = test_data("megatron/dist_tp2_optim"), out = dir_ / "out";
  ASSERT_EQ(reshard_cli({"convert", source, out, "--to", "megatron", "-q"}).exit_code, 0);
  const TensorValues found = load_checkpoint(out);
  const std::string name = "embedding.word_embeddings.weight", state = "optimizer.state." + name;
  for (const auto& [suffix, is_zero] : {std::pair(".fp32_param", false), std::pair(".exp_avg", true)}) {
    const auto& value = found.at(state + suffix);
    ASSERT_EQ(value.shape[0], 384);
    const auto row = value.bytes.size() / 384;
    const std::string last(value.bytes.begin() + static_cast<std::ptrdiff_t>(383 * row), value.bytes.end());
    const std::string word(value.bytes.begin() + static_cast<std::ptrdiff_t>(256 * row),
                           value.bytes.begin() + static_cast<std::ptrdiff_t>(257 * row));
    EXPECT_EQ(last, is_zero ? std::string(row, '\0') : word) << suffix;
  }
}

TEST_F(MegatronTarget, StateThatIsNotAdamsIsNotWritten) {
  const std::string source = test_data("megatron/dist_tp2_optim"), out = dir_ / "out";
  const auto error_without = [&](const std::string& glob) {
    const CommandResult r = reshard_cli({"convert", source, out, "--to", "megatron", "-q", "--exclude", glob});
    EXPECT_EQ(r.exit_code, 4) << r.err;
    return r.err;
  };
  EXPECT_THAT(error_without("*.exp_avg_sq"), HasSubstr("the optimizer has no exp_avg_sq of"));
  EXPECT_THAT(error_without("optimizer.state.decoder.layers.1.mlp.*"),
              HasSubstr("the optimizer has no moments, or no master, of 'decoder.layers.1.mlp.linear_fc1."));
  EXPECT_THAT(error_without("*.betas"), HasSubstr("the optimizer's groups have no betas"));
  // The whole optimizer may be left out.
  const CommandResult r = reshard_cli({"convert", source, out, "--to", "megatron", "--exclude", "optim*"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(read_file(out + "/latest_checkpointed_iteration.txt"), "release");
}

TEST_F(MegatronTarget, WhatArgsHaveNoWordsForIsNotWritten) {
  const std::string model = dir_ / "model", source = test_data("megatron/dist_tp2_dp2_dpreshardable");
  ASSERT_EQ(reshard_cli({"convert", source, model, "--to", "hf", "-q"}).exit_code, 0);
  const std::string config = read_file(model + "/config.json");
  const auto error_with = [&](const std::string& from, const std::string& to) {
    std::string changed = config;
    changed.replace(changed.find(from), from.size(), to);
    write_file(model + "/config.json", changed);
    const CommandResult r = reshard_cli({"convert", model, dir_ / "out", "--to", "megatron", "-q"});
    EXPECT_EQ(r.exit_code, 4) << r.err;
    return r.err;
  };
  EXPECT_THAT(error_with(R"("silu")", R"("gelu")"), HasSubstr("hidden_act is gelu"));
  EXPECT_THAT(error_with(R"("vocab_size")", R"("sliding_window": 16, "vocab_size")"),
              HasSubstr("sliding_window is set"));
  EXPECT_THAT(error_with(R"("vocab_size")", R"("rope_scaling": {"type": "yarn"}, "vocab_size")"),
              HasSubstr("its rotary embedding is stretched (yarn)"));
  EXPECT_THAT(error_with(R"("llama")", R"("gemma2")"), HasSubstr("gemma2"));
  write_file(model + "/config.json", config);
  const CommandResult named = reshard_cli({"convert", model, dir_ / "out", "--to", "megatron", "--names", "hf", "-q"});
  EXPECT_THAT(named.err, HasSubstr("Megatron-LM: only Megatron core names are supported"));
  fs::remove(model + "/config.json");
  const CommandResult without = reshard_cli({"convert", model, dir_ / "out", "--to", "megatron", "-q"});
  EXPECT_THAT(without.err, HasSubstr("args, which are made from the model's config.json; add it with --config"));
  EXPECT_FALSE(fs::exists(dir_ / "out"));
}

// ---- Files of ranks, written

constexpr const char* kLegacy[] = {"megatron-legacy", "megatron-legacy-local"};

TEST_F(MegatronTarget, FilesOfRanksAreWrittenFromAModelAndReadAgain) {
  int turn = 0;
  for (const std::string name : kReal) {
    const std::string source = test_data("megatron/" + name), model = dir_ / (name + ".hf");
    if (!fs::exists(source + ".hf.json")) continue;
    ASSERT_EQ(reshard_cli({"convert", source, model, "--to", "hf", "-q"}).exit_code, 0);
    std::vector<std::string> meshes = {"tp=2,pp=2", "dp_shard=2"};
    if (name == "legacy_tp2_ep2_moe_plain") meshes = {"tp=2,pp=2,ep=2", "ep=4"};
    for (const char* to : kLegacy)
      for (const std::string& mesh : meshes) {
        if (turn++ % every_nth(6) != 0) continue;
        const std::string out = dir_ / (name + to + mesh);
        const CommandResult r = reshard_cli({"convert", model, out, "--to", to, "--mesh", mesh});
        ASSERT_EQ(r.exit_code, 0) << name << r.err;
        EXPECT_THAT(r.out, HasSubstr(" rows (repeat-last) are added to the vocabulary of "));
        EXPECT_EQ(read_file(out + "/latest_checkpointed_iteration.txt"), "release");
        EXPECT_TRUE(recognises(kMegatronLegacyFormat, out));
        const CommandResult verified = reshard_cli({"verify", out, "--replicas", "--fail-on", "warning"});
        EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
        expect_read_back(out, source, model);
      }
  }
}

// Returns a description of a value in a torch.save file; tensors as their shape.
std::map<std::string, std::string> content_of(const std::string& path) {
  std::map<std::string, std::string> out;
  const auto file = File::open(path);
  EXPECT_TRUE(file) << file.error().message();
  const auto content = TensorFile::open(*file);
  EXPECT_TRUE(content) << content.error().message();
  for (const TensorFile::Entry& e : content->tensors())
    out.emplace(e.name, std::string(info(e.tensor.dtype).torch_name) + to_string(e.tensor.shape()));
  return out;
}

// A rank's file has every key and shape that Megatron saves, except for the experts, which Megatron had not cut.
TEST_F(MegatronTarget, FilesOfRanksLieAsMegatronSavesThem) {
  const std::string source = test_data("megatron/legacy_tp2_ep2_moe_plain"), out = dir_ / "out";
  const CommandResult r = reshard_cli({"convert", source, out, "--to", "megatron-legacy-local", "--mesh", "tp=2,ep=2",
                                       "--vocab-divisible-by", "24", "-q"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(read_file(out + "/latest_checkpointed_iteration.txt"), "10");
  EXPECT_TRUE(fs::exists(out + kIteration + "/mp_rank_01_000/model_optim_rng.pt"));
  const auto own = content_of(source + kIteration + "/mp_rank_01_001/model_optim_rng.pt");
  const auto written = content_of(out + kIteration + "/mp_rank_01_001/model_optim_rng.pt");
  std::size_t compared = 0;
  for (const auto& [name, shape] : own) {
    if (name.starts_with("rng_state")) continue;
    ASSERT_TRUE(written.contains(name)) << name;
    if (name.find("local_experts") != std::string::npos || name.starts_with("optimizer.1.")) continue;
    EXPECT_EQ(written.at(name), shape) << name;
    ++compared;
  }
  EXPECT_GT(compared, 40U);
  for (const auto& [name, shape] : written) EXPECT_TRUE(own.contains(name)) << name;
  // Each rank's files contain the same state.
  TensorValues there = load_checkpoint(source), here = load_checkpoint(out);
  const auto is_padded = [](const auto& value) {
    return value.first.find("word_embeddings") != std::string::npos ||
           value.first.find("output_layer") != std::string::npos;
  };
  EXPECT_GT(std::erase_if(there, is_padded), 6U);
  std::erase_if(here, is_padded);
  EXPECT_EQ(digests_of(here), digests_of(there));
}

// Transformer Engine's optimizer counts its steps in its groups, torch's for each parameter.
TEST_F(MegatronTarget, APlainOptimizerGoesToBothKindsOfModules) {
  const std::string source = test_data("megatron/dist_tp2_optim");
  for (const char* to : kLegacy) {
    const std::string out = dir_ / to;
    const CommandResult r = reshard_cli({"convert", source, out, "--to", to, "--mesh", "pp=2", "-q"});
    ASSERT_EQ(r.exit_code, 0) << r.err;
    const auto open = open_checkpoint(out);
    ASSERT_TRUE(open) << open.error().message();
    std::map<std::string, std::string> objects;
    for (const Blob& blob : open->reader->catalog().blobs) objects.emplace(blob.name, open->reader->describe(blob));
    const bool is_te = std::string_view(to) == kLegacy[0];
    EXPECT_EQ(objects.contains("optimizer.param_groups.0.step"), is_te);
    EXPECT_EQ(objects["optimizer.param_groups.0.wd_mult"], "1.0");
    EXPECT_EQ(objects["optimizer.param_groups.1.wd_mult"], "0.0");
    EXPECT_EQ(objects["extra_state.iteration"], "10");
    const Catalog& catalog = open->reader->catalog();
    EXPECT_EQ(catalog.find("optimizer.state.decoder.final_layernorm.weight.step").has_value(), !is_te);
    EXPECT_EQ(catalog.find("decoder.layers.0.input_layernorm.weight").has_value(), !is_te);
    EXPECT_EQ(catalog.find("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight").has_value(), is_te);
    EXPECT_THAT(reshard_cli({"inspect", out}).out, HasSubstr("optimizer plain"));
    for (const std::string& from : {source, out})
      ASSERT_EQ(reshard_cli({"convert", from, dir_ / (from == out ? "a" : "b"), "--to", "dcp", "--names", "hf", "-q",
                             "--force"})
                    .exit_code,
                0);
    EXPECT_EQ(digests_of(load_checkpoint(dir_ / "a")), digests_of(load_checkpoint(dir_ / "b"))) << to;
  }
}

TEST_F(MegatronTarget, WhatFilesOfRanksCannotHoldIsNotWritten) {
  const std::string source = test_data("megatron/dist_tp2_optim"), out = dir_ / "out";
  const auto error_of_mesh = [&](const std::string& mesh, int code, const std::vector<std::string>& more = {}) {
    std::vector<std::string> args = {"convert", source, out, "--to", "megatron-legacy", "-q", "--mesh", mesh};
    args.insert(args.end(), more.begin(), more.end());
    const CommandResult r = reshard_cli(args);
    EXPECT_EQ(r.exit_code, code) << r.err;
    EXPECT_FALSE(fs::exists(out));
    return r.err;
  };
  EXPECT_THAT(error_of_mesh("tp=3", 4), HasSubstr("tp=3 does not divide 8 attention heads and 4 key-value heads"));
  EXPECT_THAT(error_of_mesh("pp=3", 2), HasSubstr("pp=3"));
  EXPECT_THAT(error_of_mesh("ep=2", 2), HasSubstr("ep=2 does not divide 0 experts"));
  EXPECT_THAT(error_of_mesh("tp=2", 4, {"--dtype", "float32"}),
              HasSubstr("is float32: an optimizer with masters needs weights in bfloat16 or float16"));
  EXPECT_THAT(error_of_mesh("tp=2", 4, {"--exclude", "*.exp_avg_sq"}), HasSubstr("the optimizer has no exp_avg_sq of"));
}

// Experts that are distributed over ranks have an optimizer of their own, in torch_dist and in per-rank files.
TEST_F(MegatronTarget, ExpertsThatRanksShareOutHaveTheirOwnGroups) {
  const std::string source = test_data("megatron/legacy_tp2_ep2_moe_plain");
  for (const char* to : {"megatron", "megatron-legacy", "megatron-legacy-local"})
    for (const char* mesh : {"ep=2", "tp=2"}) {
      const std::string out = dir_ / (std::string(to) + mesh);
      const CommandResult r = reshard_cli({"convert", source, out, "--to", to, "--mesh", mesh, "-q"});
      ASSERT_EQ(r.exit_code, 0) << r.err;
      const CommandResult verified = reshard_cli({"verify", out, "--fail-on", "warning"});
      EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
      const auto open = open_checkpoint(out);
      ASSERT_TRUE(open) << open.error().message();
      std::map<std::string, std::string> objects;
      for (const Blob& blob : open->reader->catalog().blobs) objects.emplace(blob.name, open->reader->describe(blob));
      EXPECT_EQ(objects["optimizer.param_groups.0.is_expert_parallel"], "False");
      EXPECT_EQ(objects["optimizer.param_groups.1.wd_mult"], "0.0");
      EXPECT_EQ(objects["optimizer_1.param_groups.0.is_expert_parallel"], mesh[0] == 'e' ? "True" : "");
      EXPECT_FALSE(objects.contains("optimizer_1.param_groups.1.wd_mult"));
    }
}

}  // namespace
}  // namespace reshard::megatron_target_test
