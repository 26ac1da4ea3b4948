// SPDX-License-Identifier: Apache-2.0
// LoRA adapters next to the weights they change, as PEFT trains them (peft/tuners/lora). They are written separately
// for PEFT, or merged into the weights.
//
//   model.layers.0.self_attn.q_proj.weight                                    [out, in]
//   peft_adapter.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [r, in]     (plain keys, parts.h)
//   peft_adapter.base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, r]
//   peft_adapter.base_model.model.lm_head.weight                                  instead of lm_head.weight
//   peft_adapter.base_model.model.model.embed_tokens.lora_embedding_A             [r, rows]   of an embedding
//   peft_adapter.base_model.model.model.embed_tokens.lora_embedding_B             [width, r]
//   peft_adapter.base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta   rows of an embedding
//   peft_adapter.base_model.model.model.layers.0.mlp.experts.lora_A.weight              [E r, in]   of all experts
//   peft_adapter.base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight   of another fused parameter
//
// A module may have several fused parameters (fused_parameters.h). Each adapter wraps the module once more, so the one
// with the most ".base_layer" belongs to the parameter that is defined first.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/convert/view/source_view.h"
#include "lib/source/computed_source.h"

namespace reshard {

struct AdapterOptions {
  Reader* reader = nullptr;     // of a separate adapter; null: the source contains it
  std::optional<double> alpha;  // used if no adapter_config.json gives it
};

// A weight and the product that is added to it: b x a * scaling. If the matrices belong to several experts, expert e
// has the rows [e * rank, (e + 1) * rank) of `a` and the columns e, e + experts, ... of `b`.
struct LowRank {
  std::size_t weight = 0;           // in the view
  std::size_t a = 0, b = 0;         // in the adapter's catalog
  std::optional<std::size_t> onto;  // in the adapter's catalog: the whole weight, if the adapter stores it
  Index rank = 1;
  float scaling = 0;
  bool is_transposed = false;         // the transpose of the product is added
  bool is_rounded_to_weight = false;  // the product is rounded to the weight's dtype before it is added
  Index experts = 1;
  Index expert = 0;     // the expert of the weight; -1: the weight's first dimension is the experts
  Index first_row = 0;  // row of the product (or its transpose) that is added to the weight's first row
};

// A weight that the adapter replaces: one of a fully trained module (modules_to_save), or a bias.
struct Replaced {
  std::size_t weight = 0;            // in the view
  std::size_t by = 0;                // in the adapter's catalog
  std::optional<std::size_t> equal;  // in the adapter's catalog: replaces the weight that is tied to this one
};

// Rows of a weight that the adapter replaces (trainable_token_indices).
struct TrainedRows {
  std::size_t weight = 0;   // in the view
  std::size_t by = 0;       // in the adapter's catalog
  std::vector<Index> rows;  // of the weight, that the rows of `by` replace
};

struct Adapter {
  std::string config;              // adapter_config.json
  std::vector<std::string> notes;  // warnings: modules that it does not change, because their alpha is 0
  // Empty unless the adapter is merged.
  std::vector<LowRank> added;
  std::vector<Replaced> replaced;
  std::vector<TrainedRows> trained_rows;

  bool is_merged() const { return !added.empty() || !replaced.empty() || !trained_rows.empty(); }
  std::vector<std::size_t> operands() const;  // in the adapter's catalog, ascending
};

// The use of an adapter: none, written next to the model, or merged into it.
enum class AdapterUse { kNone, kWritten, kMerged };

// Reads the adapter of `source`, or that of `options.reader`, without what `selection` excludes; of an adapter in the
// source, without what `selection` does not include either. Returns nothing if there is none. Fails (corrupt), naming
// the tensor, if one matrix of a pair is missing, a rank contradicts the config, or matrices fit no weight of `view`;
// (usage) if the alpha is unknown; (unsupported) for tensors that are neither a pair's, a whole weight's nor rows, and
// for a change of an embedding or head that are tied, because merging would untie them. If the adapter replaces both,
// merging compares what it replaces them by.
Result<std::optional<Adapter>> read_adapter(Reader& source, const AdapterOptions& options, AdapterUse use,
                                            const Selection& selection, const SourceView& view,
                                            const Translation& names);

// Returns what adapter a checkpoint contains, from names, shapes and adapter_config.json: "LoRA, rank 8, alpha 16, 14
// modules; base model: org/name". Empty if there is none.
Result<std::string> describe_adapter(Reader& reader);

// Sets the weights of `source`, in the view's numbering, to those with the adapter merged, in their own dtype. Reading
// one that is tied fails (unsupported) if the adapter gives the other one other values. All arguments must outlive
// `source`.
void merge_adapter(const Adapter& adapter, TensorSource& stored, TensorSource& operands, ComputedSource& source);

}  // namespace reshard
