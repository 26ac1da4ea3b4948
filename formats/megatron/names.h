// Names of Megatron core's parameters (megatron/core/models/gpt), how tensor parallelism cuts them, and the names that
// files have for them.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"
#include "lib/layout/layout.h"

namespace reshard::megatron {

inline constexpr std::string_view kEmbedding = "embedding.word_embeddings.weight";
inline constexpr std::string_view kHead = "output_layer.weight";
inline constexpr std::string_view kLayers = "decoder.layers.";
inline constexpr Index kMaxStack = Index{1} << 12;  // layers, and experts, of one model

// A parameter's name in Megatron core for what it is called in a file: that itself, or for what was saved before
// Megatron core "language_model.encoder.layers.0.attention.query_key_value.weight".
std::string core_name(std::string_view stored);

// No parameter, but what a module keeps beside its own: "..._extra_state".
bool is_extra_state(std::string_view name);
std::string none_in_a_list();  // the pickle of what that is, as a rule

// The modules that a model is of. Megatron core's own have the norms apart, and the experts one after the other;
// Transformer Engine's have the norms inside the linear layers that follow them, but for the one before experts, and
// each matrix of all experts in one (--moe-grouped-gemm).
struct Modules {
  bool norms_inside = false;
  bool grouped_experts = false;
};
inline constexpr Modules kOwnModules = {false, false}, kTransformerEngine = {true, true};
inline constexpr std::array<Modules, 4> kAllModules = {{kOwnModules, kTransformerEngine, {true, false}, {false, true}}};
// What these modules call a parameter.
std::string name_in(const Modules& modules, std::string_view name, bool has_experts);
// The order in which they define theirs.
std::vector<std::string> in_model_order(std::vector<std::string> names, const Modules& modules);

// A name taken apart at its numbers: "decoder.layers." 7 "mlp.experts.local_experts." 3 ".linear_fc1.weight".
struct CoreName {
  std::optional<Index> layer;
  std::optional<Index> expert;
  std::string before_expert;  // after the layer's dot
  std::string after_expert;

  bool is_expert() const { return expert.has_value(); }
  std::string text() const;
};
CoreName parse_core_name(std::string_view name);

// How tensor parallelism cuts a parameter.
struct Cut {
  int dim = -1;           // -1: every rank has all of it
  bool is_gated = false;  // each rank's part is its gate rows, then its up rows
};
// Nothing for a name that is not known. `gated`: whether linear_fc1 holds a gate.
std::optional<Cut> cut_of(std::string_view name, bool gated);

// The shape of the whole whose part this is. Corrupt where the shape cannot be cut so.
Result<Dims> whole_shape(const Cut& cut, const Dims& local, Index ranks);
Result<Dims> local_shape(const Cut& cut, const Dims& shape, Index ranks);
// Where the boxes of a rank's part lie in the whole.
std::vector<LocalBox> parts_of_rank(const Cut& cut, const Dims& local, Index rank, Index ranks);

// "optimizer.state.<parameter>.exp_avg"
std::string state_name(std::string_view parameter, std::string_view word);
KeyPath state_path(std::string_view parameter, std::string_view word);
// As ours are called, whatever the kind of optimizer calls them: "param" and "fp32_param" are masters.
std::string state_word(std::string_view stored);
inline constexpr std::string_view kMaster = "fp32_param";

}  // namespace reshard::megatron
