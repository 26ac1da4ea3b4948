#include "formats/megatron/megatron.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <random>

#include "formats/dcp/dcp.h"
#include "formats/encoding/torch_archive.h"
#include "formats/megatron/arguments.h"
#include "formats/megatron/names.h"
#include "lib/model/config.h"
#include "tests/formats/megatron/megatron_files.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"

namespace reshard::megatron_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class Megatron : public MegatronFiles {};

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
            "data-parallel ranks; 35 tokens, padded to 40 rows");
  EXPECT_EQ(saved("legacy_tp2_ep2_moe_plain"),
            "on dp=2, tp=2, ep=2, the experts' tp=1 by args; optimizer plain: each rank has the state of its own "
            "parameters; 35 tokens, padded to 48 rows");
  EXPECT_EQ(saved("dist_old_tp2_dp2_flat"),
            "on dp=2, tp=2, by args in common.pt; all layers of a parameter in one tensor; optimizer "
            "distributed, fully_sharded_model_space: flat pieces of each parameter; 257 tokens, padded to 288 rows");
  EXPECT_EQ(saved("dist_tp2_dp2_dpreshardable"),
            "on dp=2, tp=2, by args in common.pt; all layers of a parameter in one tensor; optimizer "
            "distributed, dp_reshardable: flat buffers of each tp rank and stage; 257 tokens, padded to 288 rows");
  EXPECT_EQ(saved("dist_new_moe_mixed"),
            "on pp=2, by args in an item common_state (Megatron core 0.17 or later); each layer's tensors "
            "apart; 259 tokens, padded to 272 rows");
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

// Megatron-SWIFT saves a step as Trainer names it. It saves no Megatron model if it saves no optimizer.
TEST_F(Megatron, StepsOfSwiftAreModels) {
  const std::string run = dir_ / "run", step = run + "/checkpoint-4",
                    latest = step + "/latest_checkpointed_iteration.txt";
  const std::string model = step + "/model.safetensors";
  fs::create_directories(step + "/iter_0000004");
  fs::copy(test_data("megatron/swift_common.pt"), step + "/iter_0000004/common.pt");
  write_file(latest, "4");
  EXPECT_EQ(error_of(step),
            "D/latest_checkpointed_iteration.txt: names iter_0000004, which is not a Megatron checkpoint; another "
            "iteration can be opened by its own path");
  fs::copy(sample("tp8") + "/hf.safetensors", model);
  EXPECT_EQ(reshard_cli({"latest", run}).out, step + "\n");  // does not wait for Trainer's last file
  EXPECT_TRUE(load_checkpoint(step) == load_checkpoint(model));
  const std::string note =
      "iter_0000004, which latest_checkpointed_iteration.txt names, has no tensors; the files next to it are read.";
  EXPECT_THAT(reshard_cli({"inspect", step}).out, HasSubstr(note));
  EXPECT_EQ(reshard_cli({"verify", step, "--fail-on", "warning"}).exit_code, 0);
  EXPECT_EQ(reshard_cli({"convert", step, dir_ / "out", "--to", "hf", "--family", "none"}).exit_code, 0);

  // With the optimizer, Megatron's state is read. Its args are those of the training alone.
  fs::remove_all(step + "/iter_0000004");
  fs::copy(test_data("megatron/dist_tp2_optim") + kIteration, step + "/iter_0000004");
  fs::copy(test_data("megatron/swift_common.pt"), step + "/iter_0000004/common.pt",
           fs::copy_options::overwrite_existing);
  EXPECT_EQ(reshard_cli({"latest", run}).out, step + "\n");
  EXPECT_THAT(reshard_cli({"inspect", step}).out, HasSubstr("Megatron-LM torch_dist, iteration 4"));
  const auto open = open_checkpoint(step);
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_THAT(open->reader->catalog().notes,
              testing::Contains("No config.json can be made from args: args does not describe the model (no "
                                "hidden_size, num_layers, num_attention_heads or ffn_hidden_size)."));
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
}  // namespace reshard::megatron_test
