// SPDX-License-Identifier: Apache-2.0
// Lays out --ckpt-format torch_dist: a DCP whose tensors hold a parameter of all layers and experts (drawn in
// dist_reader.h), which Megatron core loads at any degrees of parallelism.
#include <array>
#include <map>

#include "formats/dcp/dcp.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_archive.h"
#include "formats/megatron/megatron.h"
#include "formats/megatron/names.h"
#include "formats/megatron/run_state.h"
#include "formats/megatron/written_model.h"
#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard::megatron {
namespace {

// The numbers of layers and of experts that a stored tensor covers.
struct Counts {
  Index layers = 0, experts = 0;
};

// Returns a parameter's name without its numbers, which is the name of the stored tensor.
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

// The norm before the experts is stored under two names, Transformer Engine's and Megatron core's, because the model
// that loads it decides which one it needs.
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

// Returns the extra states that Megatron requires, each a list of one None: for every linear layer and every norm, for
// attention itself, and for each layer and expert.
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

// Writes the dict of an optimizer. Its states are separate tensors.
Status write_optimizer(pickle::PickleWriter& w, const RunState& run, OptimizerScope of) {
  pickle::Dict out(w);
  {
    pickle::Dict optimizer(out.key("optimizer"));
    TRY(run.write_groups(optimizer, of));
  }
  out.text("param_state_sharding_type", kFullyReshardable);
  return {};
}

Status write_optimizers(pickle::PickleWriter& w, const RunState& run, bool of_experts_apart) {
  if (!of_experts_apart) return write_optimizer(w, run, OptimizerScope::kAll);
  pickle::Dict chain(w);
  for (const OptimizerScope of : {OptimizerScope::kDense, OptimizerScope::kExperts})
    TRY(write_optimizer(chain.key(of == OptimizerScope::kExperts ? 1 : 0), run, of));
  return {};
}

Status write_common(pickle::PickleWriter& w, const WrittenModel& model) {
  const RunState* run = model.run ? &*model.run : nullptr;
  pickle::Dict common(w);
  model.args.write(common.key("args"));
  common.number("checkpoint_version", 3.0);
  if (run) {
    TRY(run->write_progress(common));
    TRY(write_optimizers(common.key("optimizer"), *run, model.shares_experts()));
  } else {
    common.integer("iteration", 0);
  }
  pickle::Dict content(common.key("content_metadata"));
  if (run) {
    content.text("distrib_optim_sharding_type", kFullyReshardable);
    content.flag("distrib_optim_fully_reshardable_mem_efficient", false);
  }
  content.flag("singleton_local_shards", false);
  content.flag("chained_optim_avoid_prefix", true);
  return {};
}

// Returns common.pt, which holds all values that are not tensors.
Result<std::string> common_file(const WrittenModel& model) {
  pickle::PickleWriter w;
  TRY(write_common(w, model));
  return torch_archive::object_item(std::move(w).finish());
}

// Returns the prefix of a parameter's state, "optimizer.state.exp_avg.", or an empty text for the parameter itself.
std::string stored_state(const StateKey& key) {
  if (key.kind == StateKind::kModel) return {};
  const bool is_master = key.suffix == kMasterSuffix;  // a distributed optimizer's name
  return "optimizer.state." + (is_master ? std::string("param") : key.suffix.substr(1)) + ".";
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out_sharded(LayoutRequest request) {
  WrittenModel model = TRY(WrittenModel::read(request));
  model.args.set("ckpt_format", "torch_dist");
  if (model.run) {
    model.args.set("use_distributed_optimizer", true);
    model.args.set("dist_ckpt_optim_fully_reshardable", true);
  }
  std::map<std::string, Counts> stored;
  dcp::DcpStorage storing;
  for (const auto& [key, core] : model.parts) {
    Dims at, counts;
    if (core.layer) {
      at.push_back(*core.layer);
      counts.push_back(model.layers);
    }
    if (core.is_expert()) {
      at.push_back(*core.expert);
      counts.push_back(model.experts);
    }
    const std::string name = stored_name(core);
    std::vector<dcp::Slice> slices;
    for (const std::string& own : model.experts > 0 ? names_of_norm(name) : std::vector<std::string>{name}) {
      slices.push_back({stored_state(key) + own, at, counts});
      if (key.kind == StateKind::kModel)
        stored.emplace(own, Counts{core.layer ? model.layers : 0, core.is_expert() ? model.experts : 0});
    }
    storing.slices.push_back(std::move(slices));
  }
  storing.directory = model.directory();
  std::string common = TRY(common_file(model));
  storing.texts = {{storing.directory + std::string(kCommonFile), std::move(common)},
                   {storing.directory + std::string(kMetadataFile),
                    to_text(Json::object().set("sharded_backend", "torch_dist").set("sharded_backend_version", 1))},
                   {std::string(kLatestFile), model.latest()}};
  request.blobs = extra_states(stored);
  return dcp::lay_out(std::move(request), std::move(storing));
}

}  // namespace reshard::megatron
