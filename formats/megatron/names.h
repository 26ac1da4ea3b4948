// SPDX-License-Identifier: Apache-2.0
// Names of Megatron core's parameters (megatron/core/models/gpt) in the model and in files, and how tensor parallelism
// cuts them.
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

// Returns a parameter's name in Megatron core. `stored` is its name in a file: the same, or in files from before
// Megatron core "language_model.encoder.layers.0.attention.query_key_value.weight".
std::string core_name(std::string_view stored);

// Returns whether this is not a parameter but a module's "..._extra_state".
bool is_extra_state(std::string_view name);
// Returns the pickle of [None], which an extra state usually is.
std::string none_in_a_list();

// The implementation of a model's modules. Megatron core's own modules have separate norms and separate experts.
// Transformer Engine's have each norm inside the linear layer that follows it, except the norm before experts, and one
// matrix for all experts (--moe-grouped-gemm).
struct Modules {
  bool norms_inside = false;
  bool grouped_experts = false;
};
inline constexpr Modules kOwnModules = {false, false}, kTransformerEngine = {true, true};
inline constexpr std::array<Modules, 4> kAllModules = {{kOwnModules, kTransformerEngine, {true, false}, {false, true}}};
// Returns a parameter's name in these modules.
std::string name_in(const Modules& modules, std::string_view name, bool has_experts);
// Sorts names into the order in which these modules define their parameters.
std::vector<std::string> in_model_order(std::vector<std::string> names, const Modules& modules);

// A name split at its numbers: "decoder.layers." 7 "mlp.experts.local_experts." 3 ".linear_fc1.weight".
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
  int dim = -1;           // -1: every rank has the whole
  bool is_gated = false;  // each rank's part is its gate rows, then its up rows
};
// Returns nothing for an unknown name. `gated` says whether linear_fc1 holds a gate.
std::optional<Cut> cut_of(std::string_view name, bool gated);

// Return the shape of the whole for a part, and of a part for the whole. Fail with kCorrupt if it cannot be cut so.
Result<Dims> whole_shape(const Cut& cut, const Dims& local, Index ranks);
Result<Dims> local_shape(const Cut& cut, const Dims& shape, Index ranks);
// Returns the boxes of a rank's part: in the whole, and in the part.
std::vector<LocalBox> parts_of_rank(const Cut& cut, const Dims& local, Index rank, Index ranks);

// Returns "optimizer.state.<parameter>.exp_avg".
std::string state_name(std::string_view parameter, std::string_view word);
KeyPath state_path(std::string_view parameter, std::string_view word);
// Returns our name of an optimizer's state, which differs between kinds of optimizers: "param" and "fp32_param" are
// both the master.
std::string state_word(std::string_view stored);
inline constexpr std::string_view kMaster = "fp32_param";

}  // namespace reshard::megatron
