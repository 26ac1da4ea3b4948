// --ckpt-format torch_dist, written: a DCP whose tensors hold all layers, and all experts, of a parameter at once
// (dist_reader.cc draws it), so that Megatron core loads it at any degrees.
#include <array>
#include <map>
#include <numeric>
#include <optional>

#include "formats/dcp/dcp.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_archive.h"
#include "formats/megatron/arguments.h"
#include "formats/megatron/megatron.h"
#include "formats/megatron/names.h"
#include "formats/megatron/run_state.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"

namespace reshard::megatron {
namespace {

constexpr Index kVocabularyUnit = 128;  // --make-vocab-size-divisible-by

// How often a model has what there is of each layer and each expert.
struct Counts {
  Index layers = 0, experts = 0;
};

// A parameter's name without its numbers: what torch_dist keeps it in.
std::string stored_name(const CoreName& core) {
  const std::string front = core.layer ? std::string(kLayers) : std::string();
  if (!core.is_expert()) return front + core.before_expert;
  std::string name = core.before_expert + core.after_expert;
  for (const std::string_view place : {"experts.local_experts.", "experts."})
    if (const std::size_t at = name.find(place); at != std::string::npos) {
      name.replace(at, place.size(), "experts.experts.");
      break;
    }
  if (const std::size_t dots = name.find(".."); dots != std::string::npos) name.erase(dots, 1);
  return front + name;
}

// Which of the two names the norm before the experts has, Transformer Engine's or the other, the model that loads it
// decides: it is stored under both.
constexpr std::array<std::string_view, 2> kNormBeforeExperts = {"decoder.layers.mlp.linear_fc1.layer_norm_",
                                                                "decoder.layers.pre_mlp_layernorm."};
std::vector<std::string> names_of_norm(const std::string& stored) {
  for (const std::string_view name : kNormBeforeExperts) {
    std::string_view rest = stored;
    if (!take(rest, name)) continue;
    std::vector<std::string> out;
    for (const std::string_view other : kNormBeforeExperts) out.push_back(std::string(other) + std::string(rest));
    return out;
  }
  return {stored};
}

// What a module keeps beside its parameters: nothing, as a list of one None, and Megatron wants it to be there. Of
// every layer that multiplies and every norm, of attention itself, and of each layer and expert.
std::vector<TargetBlob> extra_states(const std::map<std::string, Counts>& stored) {
  const std::string nothing = torch_archive::object_item(none_in_a_list());
  std::map<std::string, Counts> modules;
  for (const auto& [name, counts] : stored) {
    std::string_view module = name;
    module = module.substr(0, module.rfind('.'));
    if (module.find("layer") == std::string_view::npos || module.ends_with(".router")) continue;
    modules.emplace(module, counts);
    if (module.ends_with("self_attention.linear_qkv"))
      modules.emplace(std::string(kLayers) + "self_attention.core_attention", counts);
  }
  std::vector<TargetBlob> out;
  const auto add = [&](const std::string& name) { out.push_back({name, {name}, nothing}); };
  for (const auto& [module, counts] : modules) {
    const std::string front = module + "._extra_state/shard_";
    if (counts.layers == 0) add(front + "0_1");
    for (Index layer = 0; layer < counts.layers; ++layer) {
      const std::string at = front + std::to_string(layer), of = "_" + std::to_string(counts.layers);
      if (counts.experts == 0) add(at + of);
      for (Index e = 0; e < counts.experts; ++e)
        add(at + "." + std::to_string(e) + of + "." + std::to_string(counts.experts));
    }
  }
  return out;
}

// common.pt: what is no tensor. `run` is null for weights alone.
Result<std::string> common_file(const Arguments& args, const RunState* run) {
  pickle::PickleWriter w;
  w.empty_dict();
  w.mark();
  w.text("args");
  args.write(w);
  w.text("checkpoint_version");
  w.number(3.0);
  if (run) {
    TRY(run->write(w));
  } else {
    w.text("iteration");
    w.integer(0);
  }
  w.text("content_metadata");
  w.empty_dict();
  w.mark();
  if (run) {
    w.text("distrib_optim_sharding_type");
    w.text(kFullyReshardable);
    w.text("distrib_optim_fully_reshardable_mem_efficient");
    w.boolean(false);
  }
  w.text("singleton_local_shards");
  w.boolean(false);
  w.text("chained_optim_avoid_prefix");
  w.boolean(true);
  w.set_items();
  w.set_items();
  return torch_archive::object_item(std::move(w).finish());
}

Status add_degrees(Arguments& args, const LayoutRequest& request) {
  const Index tp = request.mesh.size("tp"), pp = request.mesh.size("pp"), ranks = request.mesh.ranks();
  args.set("tensor_model_parallel_size", tp);
  args.set("pipeline_model_parallel_size", pp);
  args.set("expert_model_parallel_size", Index{1});
  args.set("world_size", ranks);
  args.set("data_parallel_size", ranks / (tp * pp));
  for (const TargetTensor& t : request.tensors) {
    if (t.name != kEmbedding || t.shape.rank() == 0) continue;
    args.set("padded_vocab_size", t.shape[0]);
    args.set("make_vocab_size_divisible_by", std::gcd(t.shape[0] / tp, kVocabularyUnit));
    return {};
  }
  return unsupported("a checkpoint of Megatron is of a whole model under Megatron's names: expected '" +
                     std::string(kEmbedding) + "' among its tensors");
}

// "optimizer.state.exp_avg.": before the name of the parameter whose state it is; empty for the parameter itself.
std::string stored_state(const StateKey& key) {
  if (key.kind == StateKind::kModel) return {};
  const bool is_master = key.suffix == kMasterSuffix;  // as a distributed optimizer calls it
  return "optimizer.state." + (is_master ? std::string("param") : key.suffix.substr(1)) + ".";
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out_sharded(LayoutRequest request) {
  if (!request.config)
    return usage_error("a checkpoint of Megatron holds args, which are made of the model's config.json; --config FILE");
  Arguments args = TRY(arguments_of(*request.config).context(std::string(kConfigFile)));
  TRY(add_degrees(args, request));
  args.set("ckpt_format", "torch_dist");
  args.set("no_save_rng", true);
  args.set("no_save_optim", true);
  std::optional<RunState> run;
  if (TRY(has_adam(request, "Megatron"))) {
    run = TRY(RunState::read(request));
    run->add_to(args);
  }

  const Index layers = *args.number("num_layers"), experts = args.number("num_experts").value_or(0);
  std::map<std::string, Counts> stored;
  dcp::Storing storing;
  for (const TargetTensor& t : request.tensors) {
    const StateKey key = split_state_key(t.name);
    const CoreName core = parse_core_name(key.parameter);
    if (core.layer.value_or(0) >= layers || (core.is_expert() && (!core.layer || *core.expert >= experts)) ||
        !(core.layer || key.parameter.starts_with("embedding.") || key.parameter.starts_with("decoder.") ||
          key.parameter == kHead))
      return unsupported(tensor_text(t.name) + ": is no parameter that Megatron has in a model of " +
                         count_of(layers, "layer") + (experts > 0 ? " and " + count_of(experts, "expert") : ""));
    Dims at, counts;
    if (core.layer) {
      at.push_back(*core.layer);
      counts.push_back(layers);
    }
    if (core.is_expert()) {
      at.push_back(*core.expert);
      counts.push_back(experts);
    }
    const std::string name = stored_name(core);
    std::vector<dcp::Slice> slices;
    for (const std::string& own : experts > 0 ? names_of_norm(name) : std::vector<std::string>{name}) {
      slices.push_back({stored_state(key) + own, at, counts});
      if (key.kind == StateKind::kModel)
        stored.emplace(own, Counts{core.layer ? layers : 0, core.is_expert() ? experts : 0});
    }
    storing.slices.push_back(std::move(slices));
  }
  const std::string iteration = run ? std::to_string(run->iteration()) : std::string(kRelease);
  storing.directory = (run ? iteration_directory(iteration) : iteration) + "/";
  storing.texts = {{storing.directory + std::string(kCommonFile), TRY(common_file(args, run ? &*run : nullptr))},
                   {storing.directory + std::string(kMetadataFile),
                    to_text(Json::object().set("sharded_backend", "torch_dist").set("sharded_backend_version", 1))},
                   {std::string(kLatestFile), iteration}};
  request.blobs = extra_states(stored);
  return dcp::lay_out(std::move(request), std::move(storing));
}

}  // namespace reshard::megatron
