// SPDX-License-Identifier: Apache-2.0
#include "formats/megatron/written_model.h"

#include <numeric>
#include <set>

#include "formats/megatron/megatron.h"
#include "formats/tensor_files/adam_state.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"

namespace reshard::megatron {
namespace {

constexpr Index kVocabularyUnit = 128;  // --make-vocab-size-divisible-by

Error no_whole_model(const std::string& missing) {
  return unsupported("a Megatron checkpoint holds a whole model under Megatron's names: expected " + missing +
                     " among its tensors");
}

Status add_vocabulary(Arguments& args, const LayoutRequest& request, Index tp) {
  for (const TargetTensor& t : request.tensors) {
    if (t.name != kEmbedding || t.shape.rank() == 0) continue;
    args.set("padded_vocab_size", t.shape[0]);
    args.set("make_vocab_size_divisible_by", std::gcd(t.shape[0] / tp, kVocabularyUnit));
    return {};
  }
  return no_whole_model("'" + std::string(kEmbedding) + "'");
}

// Megatron counts the layers in its files and compares the number with args.
Status check_layers(const WrittenModel& model) {
  std::set<Index> layers;
  for (const WrittenModel::Part& part : model.parts)
    if (part.name.layer) layers.insert(*part.name.layer);
  for (Index i = 0; i < model.layers; ++i)
    if (!layers.contains(i)) return no_whole_model("tensors of layer " + std::to_string(i));
  return {};
}

}  // namespace

std::string WrittenModel::latest() const { return run ? std::to_string(run->iteration()) : std::string(kRelease); }

std::string WrittenModel::directory() const { return (run ? iteration_directory(latest()) : latest()) + "/"; }

Result<WrittenModel> WrittenModel::read(const LayoutRequest& request) {
  if (!request.config)
    return usage_error(
        "a Megatron checkpoint contains args, which are made from the model's config.json; add it with --config");
  WrittenModel out;
  out.args = TRY(arguments_of(*request.config).context(std::string(kConfigFile)));
  out.layers = *out.args.number("num_layers");
  out.experts = out.args.number("num_experts").value_or(0);
  out.tp = request.mesh.size("tp");
  out.pp = request.mesh.size("pp");
  out.ep = request.mesh.size("ep");
  const Index ranks = request.mesh.ranks();
  if (out.ep > 1 && (out.experts == 0 || out.experts % out.ep != 0))
    return usage_error("ep=" + std::to_string(out.ep) + " does not divide " + count_of(out.experts, "expert"));
  out.args.set("tensor_model_parallel_size", out.tp);
  out.args.set("pipeline_model_parallel_size", out.pp);
  out.args.set("expert_model_parallel_size", out.ep);
  out.args.set("world_size", ranks);
  out.args.set("data_parallel_size", ranks / (out.tp * out.pp));
  TRY(add_vocabulary(out.args, request, out.tp));
  out.args.set("no_save_rng", true);
  out.args.set("no_save_optim", true);
  if (TRY(has_adam(request, "Megatron"))) {
    out.run = TRY(RunState::read(request));
    out.run->add_to(out.args);
  }
  for (const TargetTensor& t : request.tensors) {
    StateKey key = split_state_key(t.name);
    CoreName core = parse_core_name(key.parameter);
    if (core.layer.value_or(0) >= out.layers || (core.is_expert() && (!core.layer || *core.expert >= out.experts)) ||
        !(core.layer || key.parameter.starts_with("embedding.") || key.parameter.starts_with("decoder.") ||
          key.parameter == kHead))
      return unsupported(tensor_text(t.name) + ": Megatron has no such parameter in a model of " +
                         count_of(out.layers, "layer") +
                         (out.experts > 0 ? " and " + count_of(out.experts, "expert") : ""));
    out.parts.push_back({std::move(key), std::move(core)});
  }
  TRY(check_layers(out));
  return out;
}

}  // namespace reshard::megatron
