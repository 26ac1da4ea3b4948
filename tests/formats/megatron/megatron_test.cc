#include "formats/megatron/megatron.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <random>

#include "formats/dcp/dcp.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/tensor_file.h"
#include "formats/encoding/torch_archive.h"
#include "formats/encoding/zip.h"
#include "formats/megatron/arguments.h"
#include "formats/megatron/names.h"
#include "formats/open.h"
#include "lib/model/config.h"
#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/pickle_values.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// Saves of Megatron-LM itself: 0.11.0 (flat), 0.16.1, and 0.20.0 (moe_mixed).
constexpr const char* kReal[] = {"legacy_pp2_vpp2_dp2_distopt_tied",
                                 "legacy_tp2_ep2_moe_plain",
                                 "dist_tp2_dp2_dpreshardable",
                                 "dist_tp2_optim",
                                 "dist_old_tp2_dp2_flat",
                                 "dist_new_moe_mixed"};
constexpr const char* kIteration = "/iter_0000010";

std::string without(std::string text, const std::string& path) {
  for (std::size_t at = text.find(path); at != std::string::npos; at = text.find(path))
    text.replace(at, path.size(), "D");
  return text;
}
std::string error_of(const std::string& path, const OpenOptions& options = {}) {
  const auto open = open_checkpoint(path, options);
  return open ? "" : without(open.error().message(), path);
}

class Megatron : public testing::Test {
 protected:
  std::string copy(const std::string& name) {
    const std::string path = dir_ / name;
    fs::copy(test_data("megatron/" + name), path, fs::copy_options::recursive);
    return path;
  }
  const TempDir dir_;
};

// ---- Real ones

TEST_F(Megatron, BecomesTheModel) {
  for (const std::string name : kReal) {
    const std::string source = test_data("megatron/" + name), out = dir_ / name;
    if (!fs::exists(source + ".hf.json")) continue;  // a model that Hugging Face does not have
    const CommandResult r = reshard_cli({"convert", source, out, "--to", "hf", "-q"});
    ASSERT_EQ(r.exit_code, 0) << name << r.err;
    EXPECT_EQ(digests_of(load_checkpoint(out)), read_digests(source + ".hf.json")) << name;
    const auto config = read_config(out + "/config.json");
    ASSERT_TRUE(config) << config.error().message();
    const bool is_moe = name == "legacy_tp2_ep2_moe_plain";
    EXPECT_EQ(config->architecture, is_moe ? "MixtralForCausalLM" : "LlamaForCausalLM");
    EXPECT_EQ(config->vocab_size(), name.starts_with("legacy") ? 35 : 257);
    EXPECT_EQ(config->tie_word_embeddings(), name == "legacy_pp2_vpp2_dp2_distopt_tied");
    for (const std::string& path : {source, source + kIteration, out}) {
      const CommandResult verified = reshard_cli({"verify", path, "--fail-on", "warning"});
      EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
    }
  }
}

// Builds a tensor in Megatron's layout from single ones: layers and experts are concatenated.
std::optional<TensorValue> as_stored(const TensorValues& all, const std::string& before, std::string name,
                                     const std::string& after) {
  const auto replaced = [&](const std::string& from, const std::string& to) {
    if (const std::size_t at = name.find(from); at != std::string::npos) name.replace(at, from.size(), to);
  };
  const auto found = all.find(before + name + after);
  if (found != all.end()) return found->second;
  if (std::string norm = name; norm.find("linear_fc1.layer_norm_") != std::string::npos) {
    replaced("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.");
    if (auto other = as_stored(all, before, name, after)) return other;
    name = norm;
  }
  const auto stack = [&](const std::string& front, const std::string& back) {
    std::optional<TensorValue> out;
    for (Index i = 0;; ++i) {
      auto part = as_stored(all, before, front + std::to_string(i) + back, after);
      if (!part) return out;
      Dims shape = {i + 1};
      for (const Index n : part->shape) shape.push_back(n);
      if (out) part->bytes.insert(0, out->bytes);
      part->shape = shape;
      out = std::move(part);
    }
  };
  const std::string layers = "decoder.layers.", experts = "mlp.experts.experts.";
  if (name.starts_with(layers) && std::isdigit(static_cast<unsigned char>(name[layers.size()])) == 0)
    return stack(layers, "." + name.substr(layers.size()));
  if (const std::size_t at = name.find(experts); at != std::string::npos)
    return stack(name.substr(0, at) + "mlp.experts.local_experts.", "." + name.substr(at + experts.size()));
  return std::nullopt;
}

TEST_F(Megatron, HoldsWhatTheRunHeld) {
  for (const std::string name : kReal) {
    const std::string source = test_data("megatron/" + name);
    const TensorValues values = load_checkpoint(source);
    std::map<std::string, std::string> truth;
    TensorValues found;
    for (const auto& [key, digest] : read_digests(source + ".full.json")) {
      truth.emplace(key, digest);
      if (const auto value = as_stored(values, "", key, "")) found.emplace(key, *value);
    }
    if (fs::exists(source + ".optim.json"))
      for (const auto& [key, digest] : read_digests(source + ".optim.json")) {
        const std::size_t dot = key.find('.');
        const std::string word = key.substr(0, dot);
        truth.emplace(key, digest);
        const auto value =
            as_stored(values, "optimizer.state.", key.substr(dot + 1), "." + (word == "fp32" ? "fp32_param" : word));
        if (value) found.emplace(key, *value);
      }
    EXPECT_EQ(digests_of(found), truth) << name;
    EXPECT_GT(truth.size(), 13U);
  }
}

// --ckpt-format fsdp_dtensor is a plain DCP that stores gate and up of a matrix separately, "linear_fc1.weight_w" and
// "_v".
TEST_F(Megatron, HalvesOfAPlainDcpAreThoseOfTheModel) {
  for (const std::string name : {"fsdp_dtensor", "fsdp_dtensor_moe"}) {
    const std::string truth = test_data("megatron/" + name), source = truth + "/iter_0000003",
                      model = dir_ / (name + ".hf"), sharded = dir_ / (name + ".dist"), back = dir_ / (name + ".back");
    for (const auto& [from, to, more] :
         {std::tuple(source, model, std::vector<std::string>{"hf"}),
          std::tuple(source, sharded, std::vector<std::string>{"megatron", "--mesh", "tp=2"}),
          std::tuple(sharded, back, std::vector<std::string>{"dcp", "--names", "hf"})}) {
      std::vector<std::string> args = {"convert", from, to, "-q", "--to"};
      args.insert(args.end(), more.begin(), more.end());
      const CommandResult r = reshard_cli(args);
      ASSERT_EQ(r.exit_code, 0) << name << " " << more[0] << r.err;
    }
    EXPECT_EQ(digests_of(load_checkpoint(model)), read_digests(truth + ".hf.json")) << name;
    const TensorValues joined = load_checkpoint(sharded);
    EXPECT_EQ(std::count_if(joined.begin(), joined.end(),
                            [](const auto& t) { return t.first.ends_with("_w") || t.first.ends_with("_v"); }),
              0);
    TensorValues states;
    for (const auto& [key, value] : load_checkpoint(back)) {
      const StateKey parts = split_state_key(key);
      if (parts.kind != StateKind::kOptimizer || parts.suffix == kStepSuffix) continue;
      states.emplace((parts.suffix == kMasterSuffix ? "fp32" : parts.suffix.substr(1)) + "." + parts.parameter, value);
    }
    EXPECT_EQ(digests_of(states), read_digests(truth + ".optim.json")) << name;
    const CommandResult verified = reshard_cli({"verify", source, "--fail-on", "warning"});
    EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  }
}

// The args among a plain DCP's objects describe the model, like those of the other formats.
TEST_F(Megatron, ArgsOfAPlainDcpAreItsConfig) {
  const std::string truth = test_data("megatron/fsdp_dtensor");
  const TensorValues values = load_checkpoint(truth + "/iter_0000003");
  const auto write = [&](const std::string& path, const megatron::Arguments& args, const std::string& object) {
    pickle::PickleWriter w;
    args.write(w);
    LayoutRequest request;
    for (const auto& [name, value] : values) request.tensors.push_back({name, value.dtype, value.shape, {}, {}});
    request.blobs.push_back({object, {object}, torch_archive::object_item(std::move(w).finish())});
    write_target(values, **kDcpFormat.lay_out(std::move(request)), path);
  };
  megatron::Arguments args;
  for (const auto& [name, n] : std::map<std::string, Index>{{"hidden_size", 8},
                                                            {"num_layers", 2},
                                                            {"num_attention_heads", 2},
                                                            {"ffn_hidden_size", 6},
                                                            {"num_query_groups", 1},
                                                            {"vocab_size", 20}})
    args.set(name, n);
  for (const char* flag : {"swiglu", "group_query_attention", "untie_embeddings_and_output_weights"})
    args.set(flag, true);
  args.set("normalization", std::string("RMSNorm"));
  args.set("position_embedding_type", std::string("rope"));
  write(dir_ / "source", args, "args");
  for (const std::string to : {"hf", "dcp"}) {  // directly, and by a second hop
    const CommandResult r = reshard_cli({"convert", dir_ / "source", dir_ / to, "--to", to, "-q"});
    ASSERT_EQ(r.exit_code, 0) << r.err;
    ASSERT_EQ(reshard_cli({"convert", dir_ / to, dir_ / (to + ".hf"), "--to", "hf", "-q"}).exit_code, 0);
    EXPECT_EQ(digests_of(load_checkpoint(dir_ / (to + ".hf"))), read_digests(truth + ".hf.json"));
  }
  const auto json = parse_json(read_file(dir_ / "hf/config.json"), "");
  EXPECT_EQ(*json->get_string("model_type"), "llama");
  EXPECT_EQ(*json->get_index("num_key_value_heads"), 1);
  const CommandResult verified = reshard_cli({"verify", dir_ / "source", "--fail-on", "note"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  // Settings that args cannot describe are reported. Objects of that name from other programs are ignored.
  args.set("normalization", std::string("LayerNorm"));
  write(dir_ / "other", args, "args");
  EXPECT_THAT(reshard_cli({"inspect", dir_ / "other", "--json"}).out, HasSubstr("normalization is LayerNorm"));
  write(dir_ / "apart", args, "arguments");
  EXPECT_THAT(reshard_cli({"inspect", dir_ / "apart", "--json"}).out, testing::Not(HasSubstr("config.json can be")));
}

// A plain optimizer stores one step count, in the common dict; each parameter gets it.
TEST_F(Megatron, EveryParameterHasTheCommonStep) {
  const TensorValues values = load_checkpoint(test_data("megatron/dist_tp2_optim"));
  std::size_t moments = 0, steps = 0;
  for (const auto& [name, value] : values) {
    moments += name.ends_with(".exp_avg");
    if (!name.ends_with(".step")) continue;
    ++steps;
    EXPECT_EQ(value, (TensorValue{DType::kFloat32, {}, std::string("\0\0\x80\x3f", 4)})) << name;
  }
  EXPECT_EQ(moments, 15U);
  EXPECT_EQ(steps, moments);
}

TEST_F(Megatron, MastersCanBeTheModel) {
  for (const std::string name : {"legacy_pp2_vpp2_dp2_distopt_tied", "legacy_tp2_ep2_moe_plain",
                                 "dist_tp2_dp2_dpreshardable", "dist_old_tp2_dp2_flat"}) {
    const std::string source = test_data("megatron/" + name), out = dir_ / name;
    const CommandResult r = reshard_cli({"convert", source, out, "--to", "hf", "--weights", "master", "-q"});
    ASSERT_EQ(r.exit_code, 0) << name << r.err;
    const TensorValues model = load_checkpoint(out), all = load_checkpoint(source);
    const TensorValue &embedding = model.at("model.embed_tokens.weight"),
                      &master = all.at("optimizer.state.embedding.word_embeddings.weight.fp32_param");
    EXPECT_EQ(embedding.dtype, DType::kFloat32);
    EXPECT_EQ(embedding.bytes, master.bytes.substr(0, embedding.bytes.size())) << name;
  }
  EXPECT_EQ(error_of(test_data("megatron/dist_new_moe_mixed"), {.weights = Weights::kMaster}),
            "D/iter_0000010: --weights master: the checkpoint has no masters that can be read");
}

TEST_F(Megatron, InspectTellsHowItWasSaved) {
  const auto saved = [](const std::string& name) {
    const auto open = open_checkpoint(test_data("megatron/" + name));
    for (const auto& [key, value] : (*open).reader->catalog().attributes)
      if (key == "saved") return value;
    return std::string();
  };
  EXPECT_EQ(saved("legacy_pp2_vpp2_dp2_distopt_tied"),
            "on pp=2, chunks of a stage=2, dp=2 by args; optimizer distributed: flat buffers, gathered over the "
            "data-parallel ranks; 35 words, padded to 40 rows");
  EXPECT_EQ(saved("legacy_tp2_ep2_moe_plain"),
            "on dp=2, tp=2, ep=2, the experts' tp=1 by args; optimizer plain: each rank has the state of its own "
            "parameters; 35 words, padded to 48 rows");
  EXPECT_EQ(saved("dist_old_tp2_dp2_flat"),
            "on dp=2, tp=2, by args in common.pt; all layers of a parameter in one tensor; optimizer "
            "distributed, fully_sharded_model_space: flat pieces of each parameter; 257 words, padded to 288 rows");
  EXPECT_EQ(saved("dist_tp2_dp2_dpreshardable"),
            "on dp=2, tp=2, by args in common.pt; all layers of a parameter in one tensor; optimizer "
            "distributed, dp_reshardable: flat buffers of each tp rank and stage; 257 words, padded to 288 rows");
  EXPECT_EQ(saved("dist_new_moe_mixed"),
            "on pp=2, by args in an item common_state (Megatron core 0.17 or later); each layer's tensors "
            "apart; 259 words, padded to 272 rows");
  const CommandResult shown = reshard_cli({"inspect", test_data("megatron/dist_new_moe_mixed")});
  EXPECT_THAT(shown.out,
              HasSubstr("No config.json can be made from args: some of its layers have experts and others do"));
  EXPECT_THAT(shown.out, HasSubstr("saved       on pp=2"));
  EXPECT_THAT(shown.out, HasSubstr("decoder.layers.1.mlp.experts.local_experts.{0..3}.linear_fc1.weight"));
}

TEST_F(Megatron, RunsAndIterationsAreKnown) {
  const std::string path = copy("legacy_tp2_ep2_moe_plain");
  EXPECT_TRUE(recognises(kMegatronFormat, path));
  EXPECT_TRUE(recognises(kMegatronFormat, path + kIteration));
  EXPECT_FALSE(recognises(kMegatronFormat, path + kIteration + "/mp_rank_00_000"));
  write_file(path + "/latest_checkpointed_iteration.txt", "20\n");
  EXPECT_EQ(
      error_of(path),
      "D/latest_checkpointed_iteration.txt: names iter_0000020, which is missing; another iteration can be opened "
      "by its own path");
  fs::rename(path + kIteration, path + "/iter_0000020");
  EXPECT_EQ(error_of(path),
            "D/iter_0000020/mp_rank_00_000/model_optim_rng.pt: expected iteration 20, got 10: the file is from another "
            "save; copy all files of one save");
  fs::rename(path + "/iter_0000020", path + "/release");
  write_file(path + "/latest_checkpointed_iteration.txt", "release");
  EXPECT_EQ(error_of(path), "");
  write_file(path + "/latest_checkpointed_iteration.txt", "../10");
  EXPECT_FALSE(recognises(kMegatronFormat, path));
}

// ---- Written

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

TEST_F(Megatron, IsWrittenFromAModelAndReadAgain) {
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
    for (const std::string& other : {source, model}) {
      const CommandResult against = reshard_cli({"verify", out, "--against", other});
      EXPECT_EQ(against.exit_code, 0) << against.out << against.err;
    }
    // The config.json made from args is equivalent to the stored one.
    fs::remove(out + "/config.json");
    ASSERT_EQ(reshard_cli({"convert", out, out + ".back", "--to", "hf", "-q"}).exit_code, 0);
    EXPECT_EQ(digests_of(load_checkpoint(out + ".back")), read_digests(source + ".hf.json")) << name;
    EXPECT_EQ(read_file(out + ".back/config.json"), read_file(model + "/config.json")) << name;
  }
}

// Names and shapes are Megatron's own, except for the rows that pad the vocabulary.
TEST_F(Megatron, WritesWhatMegatronStores) {
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

TEST_F(Megatron, ExpertsAreStackedAndTheirNormHasBothNames) {
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
TEST_F(Megatron, AnOptimizerLiesAsMegatronStoresIt) {
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
TEST_F(Megatron, PaddingOfMastersIsThatOfWeights) {
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

TEST_F(Megatron, StateThatIsNotAdamsIsNotWritten) {
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

TEST_F(Megatron, WhatArgsHaveNoWordsForIsNotWritten) {
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
  EXPECT_THAT(named.err, HasSubstr("Megatron-LM supports only Megatron core names"));
  fs::remove(model + "/config.json");
  const CommandResult without = reshard_cli({"convert", model, dir_ / "out", "--to", "megatron", "-q"});
  EXPECT_THAT(without.err, HasSubstr("args, which are made from the model's config.json; add it with --config"));
  EXPECT_FALSE(fs::exists(dir_ / "out"));
}

// ---- Files of ranks, written

constexpr const char* kLegacy[] = {"megatron-legacy", "megatron-legacy-local"};

TEST_F(Megatron, FilesOfRanksAreWrittenFromAModelAndReadAgain) {
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
        for (const std::string& other : {source, model}) {
          const CommandResult against = reshard_cli({"verify", out, "--against", other});
          EXPECT_EQ(against.exit_code, 0) << against.out << against.err;
        }
        fs::remove(out + "/config.json");
        ASSERT_EQ(reshard_cli({"convert", out, out + ".back", "--to", "hf", "-q"}).exit_code, 0);
        EXPECT_EQ(digests_of(load_checkpoint(out + ".back")), read_digests(source + ".hf.json")) << name;
        EXPECT_EQ(read_file(out + ".back/config.json"), read_file(model + "/config.json")) << name;
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
TEST_F(Megatron, FilesOfRanksLieAsMegatronSavesThem) {
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
TEST_F(Megatron, APlainOptimizerGoesToBothKindsOfModules) {
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

TEST_F(Megatron, WhatFilesOfRanksCannotHoldIsNotWritten) {
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
TEST_F(Megatron, ExpertsThatRanksShareOutHaveTheirOwnGroups) {
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

// ---- Parts that are missing

TEST_F(Megatron, MissingRanksAreNamed) {
  const std::string moe = copy("legacy_tp2_ep2_moe_plain"), tied = copy("legacy_pp2_vpp2_dp2_distopt_tied");
  fs::remove_all(moe + kIteration + "/mp_rank_01_001");
  EXPECT_EQ(error_of(moe),
            "D/iter_0000010: no file of tp rank 1 of 2: its directory mp_rank_... is missing; args give dp=2, tp=2, "
            "ep=2, the "
            "experts' tp=1");
  fs::copy(moe + kIteration + "/mp_rank_00_000", moe + kIteration + "/mp_rank_02_001");
  EXPECT_THAT(error_of(moe), HasSubstr("D/iter_0000010/mp_rank_02_001: is not a rank of dp=2, tp=2, ep=2"));
  fs::rename(moe + kIteration + "/mp_rank_02_001", moe + kIteration + "/mp_rank_02");
  EXPECT_THAT(error_of(moe), HasSubstr("expected as many numbers in the name as in mp_rank_00_000"));

  const std::string last = tied + kIteration + "/mp_rank_00_001";
  fs::rename(last + "/distrib_optim.pt", last + "/away");
  EXPECT_EQ(error_of(tied),
            "D/iter_0000010/mp_rank_00_001/distrib_optim.pt: file is missing, which other ranks have: a part of the "
            "optimizer's state is in it");
  fs::rename(last + "/away", last + "/distrib_optim.pt");
  fs::rename(last, dir_ / "away");
  EXPECT_THAT(error_of(tied), HasSubstr("no file of tp rank 0 of 1 of stage 1"));
  fs::create_directory(last);
  EXPECT_THAT(error_of(tied), HasSubstr("mp_rank_00_001/model_optim_rng.pt: file is missing: the save did not finish"));
  // The first stage's file replaces the second's: its layers occur twice, and the final parameters are missing.
  fs::remove_all(last);
  fs::copy(tied + kIteration + "/mp_rank_00_000", last);
  EXPECT_EQ(error_of(tied), "");
  const CommandResult verified = reshard_cli({"verify", tied, "--fail-on", "error"});
  EXPECT_NE(verified.exit_code, 0) << verified.out;
  EXPECT_THAT(verified.out, HasSubstr("model.norm.weight"));
}

TEST_F(Megatron, AnUnfinishedShardedSaveIsTold) {
  const std::string path = copy("dist_tp2_dp2_dpreshardable"), iteration = path + kIteration;
  fs::rename(iteration + "/metadata.json", dir_ / "metadata.json");
  const auto unfinished = open_checkpoint(path);
  ASSERT_TRUE(unfinished) << unfinished.error().message();
  EXPECT_THAT(unfinished->reader->catalog().warnings,
              testing::ElementsAre(HasSubstr("metadata.json is missing, which is written last")));
  write_file(iteration + "/metadata.json", R"({"sharded_backend": "zarr"})");
  EXPECT_EQ(error_of(path), "D/iter_0000010/metadata.json: sharded_backend: expected torch_dist, got zarr");
  write_file(iteration + "/metadata.json", "{}");
  EXPECT_THAT(error_of(path), HasSubstr("D/iter_0000010/metadata.json"));
  fs::copy_file(dir_ / "metadata.json", iteration + "/metadata.json", fs::copy_options::overwrite_existing);
  const std::string common = read_file(iteration + "/common.pt");
  fs::remove(iteration + "/common.pt");
  const auto without_args = open_checkpoint(path);
  ASSERT_TRUE(without_args) << without_args.error().message();
  EXPECT_THAT(without_args->reader->catalog().warnings,
              testing::ElementsAre(HasSubstr("Megatron's arguments are unknown"),
                                   HasSubstr("flat buffers (dp_reshardable) keep their names")));
  EXPECT_TRUE(without_args->reader->catalog().find("decoder.layers.1.mlp.linear_fc1.weight"));
  write_file(iteration + "/common.pt", common.substr(0, common.size() / 2));
  EXPECT_THAT(error_of(path), HasSubstr("D/iter_0000010/common.pt"));
  write_file(iteration + "/common.pt", common);
  fs::remove(iteration + "/__3_1.distcp");
  EXPECT_THAT(error_of(path), HasSubstr("__3_1.distcp"));
}

TEST_F(Megatron, TruncatedFilesAreRefused) {
  const std::string path = copy("legacy_pp2_vpp2_dp2_distopt_tied");
  for (const char* name : {"/mp_rank_00_001/model_optim_rng.pt", "/mp_rank_00_000/distrib_optim.pt"}) {
    const std::string file = path + kIteration + name, whole = read_file(file);
    for (const std::size_t length : {std::size_t{0}, std::size_t{100}, whole.size() / 2, whole.size() - 1}) {
      write_file(file, std::string_view(whole).substr(0, length));
      EXPECT_THAT(error_of(path), HasSubstr(std::string(name))) << length;
    }
    write_file(file, whole);
  }
}

// A flipped bit outside the tensors' bytes is an error, or changes a value that is carried; nothing worse.
TEST_F(Megatron, SurvivesFlippedBits) {
  std::mt19937 random(3);
  for (const auto& [name, files] : std::map<std::string, std::vector<std::string>>{
           {"legacy_pp2_vpp2_dp2_distopt_tied",
            {"/mp_rank_00_001/model_optim_rng.pt", "/mp_rank_00_000/distrib_optim.pt"}},
           {"dist_new_moe_mixed", {"/.metadata", "/metadata.json"}},
           {"dist_tp2_dp2_dpreshardable", {"/.metadata", "/common.pt"}}}) {
    const std::string path = copy(name);
    for (const std::string& file : files) {
      const std::string whole = read_file(path + kIteration + file);
      // Only the pickle of a torch.save file, which comes first.
      const std::size_t pickle = std::min<std::size_t>(whole.size(), file.ends_with(".pt") ? 6000 : whole.size());
      for (int i = 0; i < 12; ++i) {
        std::string damaged = whole;
        damaged[random() % pickle] ^= static_cast<char>(1 << random() % 8);
        write_file(path + kIteration + file, damaged);
        if (const auto open = open_checkpoint(path)) {
          EXPECT_TRUE(validate(open->reader->catalog())) << file;
        }
      }
      write_file(path + kIteration + file, whole);
    }
  }
}

// ---- Constructed files, for cases without a real one

using pickled::Value;

// A torch.save file of one rank with float32 tensors that contain running numbers.
class RankFile {
 public:
  Value tensor(const Dims& shape) {
    const auto n = static_cast<std::size_t>(volume(shape));
    std::string bytes;
    for (std::size_t i = 0; i < n; ++i, next_ += 1) bytes.append(reinterpret_cast<const char*>(&next_), sizeof next_);
    storages_.push_back(std::move(bytes));
    const Value storage = [key = std::to_string(storages_.size() - 1), n](pickle::PickleWriter& w) {
      pickled::tuple({pickled::text("storage"), pickled::global("torch", "FloatStorage"), pickled::text(key),
                      pickled::text("cpu"), pickled::integer(static_cast<Index>(n))})(w);
      w.persistent_id();
    };
    const auto dims = [](const Dims& d) { return pickled::integers({d.begin(), d.end()}); };
    return pickled::call(pickled::global("torch._utils", "_rebuild_tensor_v2"),
                         {storage, pickled::integer(0), dims(shape), dims(row_major_strides(shape)),
                          pickled::boolean(false), pickled::call(pickled::global("collections", "OrderedDict"), {})});
  }
  // Sets the first of the following numbers.
  void start(float first) { next_ = first; }

  void write(const std::string& directory, const Value& value, const std::string& name = "model_optim_rng.pt") const {
    zip::Builder builder(0);
    builder.add("archive/data.pkl", pickled::bytes_of(value));
    for (std::size_t i = 0; i < storages_.size(); ++i) builder.add("archive/data/" + std::to_string(i), storages_[i]);
    fs::create_directories(directory);
    write_file(directory + "/" + name, std::move(builder).finish().before);
  }

 private:
  std::vector<std::string> storages_;
  float next_ = 0;
};

Value namespace_of(const std::map<std::string, Index>& numbers, bool swiglu = true) {
  pickled::Fields fields = {{"swiglu", pickled::boolean(swiglu)},
                            {"untie_embeddings_and_output_weights", pickled::boolean(true)}};
  for (const auto& [name, n] : numbers) fields.emplace_back(name, pickled::integer(n));
  return pickled::object(pickled::global("argparse", "Namespace"), pickled::fields_of(fields));
}

std::vector<float> numbers_of(const TensorValue& value) {
  std::vector<float> out(value.bytes.size() / sizeof(float));
  std::memcpy(out.data(), value.bytes.data(), value.bytes.size());
  return out;
}

// Two tp ranks of a model from before Megatron core, in nested dicts.
TEST_F(Megatron, NamesFromBeforeMegatronCore) {
  const std::string path = dir_ / "old/iter_0000001";
  for (int rank = 0; rank < 2; ++rank) {
    RankFile file;
    file.start(rank == 0 ? 0 : 100);
    const Value words = file.tensor({2, 2}), norm = file.tensor({2}), fc1 = file.tensor({4, 1}),
                dense = file.tensor({2, 1}), head = file.tensor({2, 2});
    using pickled::fields_of;
    file.write(
        path + "/mp_rank_0" + std::to_string(rank),
        fields_of(
            {{"args", namespace_of({{"tensor_model_parallel_size", 2}, {"num_layers", 1}})},
             {"checkpoint_version", pickled::number(3)},
             {"iteration", pickled::integer(1)},
             {"model",
              fields_of({{"language_model",
                          fields_of({{"embedding", fields_of({{"word_embeddings", fields_of({{"weight", words}})}})},
                                     {"transformer", fields_of({{"layers.0.post_attention_layernorm.weight", norm},
                                                                {"layers.0.mlp.dense_h_to_4h.weight", fc1},
                                                                {"layers.0.attention.dense.weight", dense}})},
                                     {"output_layer", fields_of({{"weight", head}})}})}})}}));
  }
  const TensorValues values = load_checkpoint(path);
  EXPECT_EQ(values.size(), 5U);
  EXPECT_EQ(numbers_of(values.at("embedding.word_embeddings.weight")),
            (std::vector<float>{0, 1, 2, 3, 100, 101, 102, 103}));
  EXPECT_EQ(numbers_of(values.at("decoder.layers.0.mlp.linear_fc1.weight")),
            (std::vector<float>{6, 7, 106, 107, 8, 9, 108, 109}));
  EXPECT_EQ(numbers_of(values.at("decoder.layers.0.self_attention.linear_proj.weight")),
            (std::vector<float>{10, 110, 11, 111}));
  EXPECT_EQ(numbers_of(values.at("decoder.layers.0.pre_mlp_layernorm.weight")), (std::vector<float>{4, 5}));
  EXPECT_TRUE(values.contains("output_layer.weight"));
  // Tensors that ranks replicate are compared.
  const CommandResult verified = reshard_cli({"verify", path, "--values"});
  EXPECT_THAT(verified.out, HasSubstr("decoder.layers.0.pre_mlp_layernorm.weight"));
}

// Stages of different sizes, with two chunks each, and a plain optimizer of two groups.
TEST_F(Megatron, ChunksOfStagesAndAPlainOptimizer) {
  const std::string path = dir_ / "iter_0000001";
  const Index layers[2][2] = {{1, 2}, {1, 1}};  // for each stage, the layers of its chunks
  for (int stage = 0; stage < 2; ++stage) {
    RankFile file;
    file.start(static_cast<float>(1000 * stage));
    pickled::Fields chunks[2];
    pickled::Entries states;
    std::vector<Dims> shapes;
    for (int chunk = 0; chunk < 2; ++chunk)
      for (Index layer = 0; layer < layers[stage][chunk]; ++layer) {
        const std::string prefix = "decoder.layers." + std::to_string(layer) + ".";
        for (const auto& [name, shape] :
             {std::pair("input_layernorm.weight", Dims{2}), std::pair("mlp.linear_fc2.weight", Dims{2, 3})}) {
          chunks[chunk].emplace_back(prefix + name, file.tensor(shape));
          shapes.push_back(shape);
        }
        chunks[chunk].emplace_back(prefix + "mlp.linear_fc2._extra_state", pickled::none());
      }
    file.start(static_cast<float>(500 + 1000 * stage));
    pickled::Values decayed, others;
    for (const int rank : {2, 1})  // matrices first
      for (const Dims& shape : shapes)
        if (shape.rank() == rank) {
          const auto id = pickled::integer(std::ssize(states));
          (rank == 2 ? decayed : others).push_back(id);
          states.emplace_back(id, pickled::fields_of({{"exp_avg", file.tensor(shape)}}));
        }
    const auto group = [](double decay, const pickled::Values& ids) {
      return pickled::fields_of({{"weight_decay", pickled::number(decay)}, {"params", pickled::list(ids)}});
    };
    file.write(
        path + "/mp_rank_00_00" + std::to_string(stage),
        pickled::fields_of(
            {{"args", namespace_of({{"pipeline_model_parallel_size", 2},
                                    {"virtual_pipeline_model_parallel_size", 2},
                                    {"num_layers", 5}})},
             {"iteration", pickled::integer(1)},
             {"model0", pickled::fields_of(chunks[0])},
             {"model1", pickled::fields_of(chunks[1])},
             {"optimizer",
              pickled::fields_of(
                  {{"optimizer", pickled::fields_of(
                                     {{"state", pickled::dict(states)},
                                      {"param_groups", pickled::list({group(0.1, decayed), group(0, others)})}})}})}}));
  }
  const TensorValues values = load_checkpoint(path);
  EXPECT_EQ(values.size(), 20U);
  const auto first = [&](const std::string& name) { return numbers_of(values.at(name)).front(); };
  const auto layer = [](int n) { return "decoder.layers." + std::to_string(n) + "."; };
  // Chunk 0 of both stages, then chunk 1 of both.
  const float weights[] = {2, 1002, 10, 18, 1010}, norms[] = {0, 1000, 8, 16, 1008};
  for (int n = 0; n < 5; ++n) {
    EXPECT_EQ(first(layer(n) + "mlp.linear_fc2.weight"), weights[n]) << n;
    EXPECT_EQ(first(layer(n) + "input_layernorm.weight"), norms[n]) << n;
  }
  EXPECT_EQ(first("optimizer.state." + layer(0) + "mlp.linear_fc2.weight.exp_avg"), 500);
  EXPECT_EQ(first("optimizer.state." + layer(3) + "mlp.linear_fc2.weight.exp_avg"), 512);
  EXPECT_EQ(first("optimizer.state." + layer(0) + "input_layernorm.weight.exp_avg"), 518);
  EXPECT_EQ(first("optimizer.state." + layer(4) + "input_layernorm.weight.exp_avg"), 1514);
}

TEST_F(Megatron, WhatCannotBeJoinedIsTold) {
  const auto write = [&](const std::string& directory, const std::map<std::string, Index>& args, double version,
                         const std::string& name) {
    RankFile file;
    file.write(dir_ / directory, pickled::fields_of({{"args", namespace_of(args)},
                                                     {"checkpoint_version", pickled::number(version)},
                                                     {"iteration", pickled::integer(1)},
                                                     {"model", pickled::fields_of({{name, file.tensor({2, 2})}})}}));
  };
  write("a/iter_0000001/mp_rank_00", {}, 1.0, "output_layer.weight");
  EXPECT_THAT(error_of(dir_ / "a/iter_0000001"), HasSubstr("checkpoint_version below 2"));
  write("b/iter_0000001/mp_rank_00", {{"num_layers", 3}}, 3.0, "decoder.layers.1.mlp.linear_fc2.weight");
  EXPECT_EQ(error_of(dir_ / "b/iter_0000001"), "D: expected 3 layers as args say, got 2 in the files of all stages");
  write("c/iter_0000001/mp_rank_00", {{"tensor_model_parallel_size", 1 << 30}}, 3.0, "output_layer.weight");
  EXPECT_THAT(error_of(dir_ / "c/iter_0000001"), HasSubstr("degrees of parallelism of at most 1,000,000"));
  write("d/iter_0000001/mp_rank_00", {{"tensor_model_parallel_size", 1'000'000}}, 3.0, "output_layer.weight");
  EXPECT_THAT(error_of(dir_ / "d/iter_0000001"), HasSubstr("no file of tp rank 1 of 1000000"));
  write("e/iter_0000001/mp_rank_00", {{"num_experts", 2}}, 3.0,
        "decoder.layers.0.mlp.experts.local_experts.7.linear_fc2.weight");
  EXPECT_THAT(error_of(dir_ / "e/iter_0000001"), HasSubstr("expected 2 experts in a file"));
  write("f/iter_0000001/mp_rank_00", {}, 3.0, "decoder.layers.123456789.mlp.linear_fc2.weight");
  EXPECT_THAT(error_of(dir_ / "f/iter_0000001"), HasSubstr("more than 4,096 layers"));
  for (const char* rank : {"g/iter_0000001/mp_rank_00", "g/iter_0000001/mp_rank_01"})
    write(rank, {{"tensor_model_parallel_size", 2}}, 3.0, "decoder.layers.0.mixer.in_proj.weight");
  const auto unknown = open_checkpoint(dir_ / "g/iter_0000001");
  ASSERT_TRUE(unknown) << unknown.error().message();
  EXPECT_THAT(
      unknown->reader->catalog().warnings,
      testing::ElementsAre("1 tensor: 'decoder.layers.0.mixer.in_proj.weight' left out: reshard does not know how "
                           "tensor parallelism cuts tensors of such names"));
  RankFile file;
  file.write(dir_ / "h/iter_0000001/mp_rank_00", pickled::fields_of({{"model", file.tensor({2})}}));
  EXPECT_THAT(error_of(dir_ / "h/iter_0000001"), HasSubstr("args: expected Megatron's arguments, got nothing"));
}

TensorValue floats(const Dims& shape, float first) {
  TensorValue out{DType::kFloat32, shape, {}};
  for (Index i = 0; i < volume(shape); ++i, first += 1)
    out.bytes.append(reinterpret_cast<const char*>(&first), sizeof first);
  return out;
}

// Names as saved with singleton_local_shards and Transformer Engine's grouped experts. Optimizer state that belongs to
// no parameter keeps its name.
TEST_F(Megatron, ShardedNamesOfOtherSpecs) {
  const std::string path = dir_ / "iter_0000001", experts = "decoder.layers.0.mlp.experts.experts.";
  write_dcp({{experts + "1.linear_fc1.weight_w", floats({2, 2}, 0)},
             {experts + "1.linear_fc1.weight_v", floats({2, 2}, 4)},
             {experts + "1.linear_fc2.weight", floats({2, 2}, 8)},
             {experts + "linear_fc1.weight3_w", floats({1, 2}, 20)},
             {experts + "linear_fc1.weight3_v", floats({1, 2}, 22)},
             {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight", floats({2}, 30)},
             {"decoder.layers.1.mlp.linear_fc1.weight_w", floats({1, 2}, 40)},
             {"decoder.layers.1.mlp.linear_fc1.weight_v", floats({1, 2}, 42)},
             {"decoder.layers.1.mlp.linear_fc1.layer_norm_weight", floats({2}, 44)},
             {"optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc1.weight_v", floats({1, 2}, 52)},
             {"chained_1.optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc1.weight_w", floats({1, 2}, 50)},
             {"optimizer.state.exp_avg.of_nothing", floats({1}, 60)}},
            path, *Mesh::parse("dp_shard=2"));
  write_file(path + "/metadata.json", R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1})");
  const TensorValues values = load_checkpoint(path);
  const auto is = [&](const std::string& name, std::vector<float> expected) {
    ASSERT_TRUE(values.contains(name)) << name;
    EXPECT_EQ(numbers_of(values.at(name)), expected) << name;
  };
  is("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", {0, 1, 2, 3, 4, 5, 6, 7});
  is("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", {8, 9, 10, 11});
  is("decoder.layers.0.mlp.experts.linear_fc1.weight3", {20, 21, 22, 23});
  is("decoder.layers.0.pre_mlp_layernorm.weight", {30, 31});
  is("decoder.layers.1.mlp.linear_fc1.weight", {40, 41, 42, 43});
  is("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", {44, 45});
  is("optimizer.state.decoder.layers.1.mlp.linear_fc1.weight.exp_avg", {50, 51, 52, 53});
  is("optimizer.state.exp_avg.of_nothing", {60});
  EXPECT_EQ(values.size(), 8U);
}

TEST_F(Megatron, NamesOfNemosWrapper) {
  const std::string path = dir_ / "weights", layers = "module.decoder.layers.";
  write_dcp({{"module.embedding.word_embeddings.weight", floats({2, 2}, 0)},
             {layers + "mlp.linear_fc1.weight", floats({2, 4, 2}, 10)},
             {layers + "mlp.linear_fc1.layer_norm_weight", floats({2, 2}, 30)},
             {"optimizer.state.exp_avg." + layers + "mlp.linear_fc1.weight", floats({2, 4, 2}, 40)}},
            path, *Mesh::parse("dp_shard=2"));
  write_file(path + "/metadata.json", R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1})");
  const TensorValues values = load_checkpoint(path);
  EXPECT_EQ(numbers_of(values.at("embedding.word_embeddings.weight")), (std::vector<float>{0, 1, 2, 3}));
  EXPECT_EQ(numbers_of(values.at("decoder.layers.1.mlp.linear_fc1.weight")),
            (std::vector<float>{18, 19, 20, 21, 22, 23, 24, 25}));
  EXPECT_EQ(numbers_of(values.at("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")), (std::vector<float>{30, 31}));
  EXPECT_EQ(numbers_of(values.at("optimizer.state.decoder.layers.0.mlp.linear_fc1.weight.exp_avg")),
            (std::vector<float>{40, 41, 42, 43, 44, 45, 46, 47}));
  EXPECT_EQ(values.size(), 7U);
}

// dp_reshardable with experts: their state belongs to another optimizer, in a buffer for each ep rank. All parameters
// have 64 elements here, and each rank has written those of one.
TEST_F(Megatron, FlatBuffersOfExperts) {
  const std::string path = dir_ / "iter_0000001", layer = "decoder.layers.";
  const auto buffer = [](int optimizer, int group) {
    return "chained_" + std::to_string(optimizer) + ".optimizer.distributed.dp_group_idx_" + std::to_string(group) +
           ".gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg";
  };
  TensorValues stored = {{"embedding.word_embeddings.weight", floats({8, 8}, 0)},
                         {layer + "self_attention.linear_proj.weight", floats({1, 8, 8}, 64)},
                         {layer + "mlp.router.weight", floats({1, 8, 8}, 128)},
                         {layer + "mlp.experts.experts.linear_fc1.weight", floats({1, 4, 8, 8}, 200)},
                         {layer + "mlp.experts.experts.linear_fc2.weight", floats({1, 4, 8, 8}, 500)},
                         {"output_layer.weight", floats({8, 8}, 800)},
                         {buffer(0, 0), floats({256}, 1000)},
                         {buffer(1, 0), floats({256}, 2000)},
                         {buffer(1, 1), floats({256}, 3000)}};
  const auto write = [&](const TensorValues& tensors, const Mesh& mesh) {
    fs::remove_all(path);
    write_dcp(tensors, path, mesh);
    write_file(path + "/metadata.json", R"({"sharded_backend": "torch_dist"})");
    RankFile().write(
        path,
        pickled::fields_of(
            {{"args",
              namespace_of({{"expert_model_parallel_size", 2}, {"num_experts", 4}, {"num_layers", 1}}, false)}}),
        "common.pt");
  };
  write(stored, *Mesh::parse("dp_shard=4"));
  const TensorValues values = load_checkpoint(path);
  EXPECT_EQ(values.size(), 24U);
  const auto first = [&](const std::string& name) {
    const auto found = values.find("optimizer.state." + name + ".weight.exp_avg");
    return found == values.end() ? -1 : numbers_of(found->second).front();
  };
  const std::string mlp = "decoder.layers.0.mlp.";
  EXPECT_EQ(first("output_layer"), 1000);
  EXPECT_EQ(first(mlp + "router"), 1064);
  EXPECT_EQ(first("decoder.layers.0.self_attention.linear_proj"), 1128);
  EXPECT_EQ(first("embedding.word_embeddings"), 1192);
  EXPECT_EQ(first(mlp + "experts.local_experts.1.linear_fc2"), 2000);
  EXPECT_EQ(first(mlp + "experts.local_experts.0.linear_fc1"), 2192);
  EXPECT_EQ(first(mlp + "experts.local_experts.2.linear_fc2"), 3128);

  // If pieces begin elsewhere, a buffer is missing or one is too short, no order is accepted.
  const auto kept = [&](const TensorValues& tensors, const Mesh& mesh) {
    write(tensors, mesh);
    const auto open = open_checkpoint(path);
    if (!open) return open.error().message();
    EXPECT_TRUE(open->reader->catalog().find(buffer(0, 0)));
    for (const std::string& warning : open->reader->catalog().warnings)
      if (warning.find("dp_reshardable") != std::string::npos) return warning;
    return std::string("taken");
  };
  EXPECT_THAT(kept(stored, *Mesh::parse("dp_shard=3")), HasSubstr("fit no known order of the parameters"));
  stored[buffer(1, 1)] = floats({320}, 3000);
  EXPECT_THAT(kept(stored, *Mesh::parse("dp_shard=4")), HasSubstr("fit no known order of the parameters"));
  stored.erase(buffer(1, 1));
  EXPECT_THAT(kept(stored, *Mesh::parse("dp_shard=4")), HasSubstr("there are 2 buffers of a model on ep=2"));
}

// A stack claims more layers than its stored pieces can contain: a shape in a file must not create a million tensors.
TEST_F(Megatron, StacksAreAsLargeAsTheirPieces) {
  const std::string path = dir_ / "iter_0000001";
  write_dcp({{"decoder.layers.mlp.linear_fc2.weight", floats({5000}, 0)},
             {"decoder.layers.input.weight", floats({400, 1}, 0)}},
            path, Mesh());
  write_file(path + "/metadata.json", R"({"sharded_backend": "torch_dist"})");
  const auto open = open_checkpoint(path);
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_EQ(open->reader->catalog().tensors().size(), 2U);
  EXPECT_TRUE(open->reader->catalog().find("decoder.layers.mlp.linear_fc2.weight"));
}

// ---- Names

TEST_F(Megatron, NamesAreTakenApart) {
  using megatron::core_name;
  EXPECT_EQ(core_name("language_model.encoder.layers.3.self_attention.query_key_value.bias"),
            "decoder.layers.3.self_attention.linear_qkv.bias");
  EXPECT_EQ(core_name("language_model.encoder.final_norm.weight"), "decoder.final_layernorm.weight");
  EXPECT_EQ(core_name("language_model.output_layer.weight"), "output_layer.weight");
  EXPECT_EQ(core_name("word_embeddings_for_head.weight"), "output_layer.weight");
  EXPECT_EQ(core_name("decoder.layers.3.mlp.router.weight"), "decoder.layers.3.mlp.router.weight");
  EXPECT_EQ(core_name("language_model.encoder.layers"), "language_model.encoder.layers");
  for (const char* name : {"decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight",
                           "decoder.layers.7.mlp.experts.linear_fc1.weight12", "output_layer.weight",
                           "decoder.layers.x.mlp.linear_fc1.weight", "decoder.layers."})
    EXPECT_EQ(megatron::parse_core_name(name).text(), name);
  EXPECT_EQ(megatron::parse_core_name("decoder.layers.7.mlp.experts.linear_fc1.weight12").expert, 12);
  EXPECT_EQ(megatron::parse_core_name("decoder.layers.7.mlp.linear_fc1.weight").layer, 7);

  const auto cut = [](std::string_view name) {
    const auto c = megatron::cut_of(name, true);
    return c ? std::to_string(c->dim) + (c->is_gated ? " gated" : "") : "unknown";
  };
  EXPECT_EQ(cut("embedding.word_embeddings.weight"), "0");
  EXPECT_EQ(cut("decoder.layers.0.self_attention.linear_qkv.bias"), "0");
  EXPECT_EQ(cut("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"), "-1");
  EXPECT_EQ(cut("decoder.layers.0.mlp.linear_fc1.bias"), "0 gated");
  EXPECT_EQ(cut("decoder.layers.0.mlp.linear_fc2.weight"), "1");
  EXPECT_EQ(cut("decoder.layers.0.mlp.linear_fc2.bias"), "-1");
  EXPECT_EQ(cut("decoder.layers.0.mlp.experts.linear_fc2.weight3"), "1");
  EXPECT_EQ(cut("decoder.layers.0.mlp.router.expert_bias"), "-1");
  EXPECT_EQ(cut("decoder.layers.0.self_attention.q_layernorm.weight"), "-1");
  EXPECT_EQ(cut("decoder.layers.0.mixer.in_proj.weight"), "unknown");
  EXPECT_EQ(cut("weight"), "unknown");
}

}  // namespace
}  // namespace reshard
