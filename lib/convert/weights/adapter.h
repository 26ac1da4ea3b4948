// LoRA adapters beside the weights they change, as PEFT trains them (peft/tuners/lora): written for PEFT by themselves,
// or added to the weights.
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

inline constexpr std::string_view kAdapterConfigFile = "adapter_config.json";

struct AdapterOptions {
  Reader* reader = nullptr;     // of an adapter by itself; null: the source's own
  std::optional<double> alpha;  // where no adapter_config.json says it
};

// A weight and what is added to it: b x a * scaling. Matrices of several experts hold those of expert e in the rows
// [e rank, (e + 1) rank) of `a`, and in the columns e, e + experts, ... of `b`.
struct LowRank {
  std::size_t weight = 0;           // in the view
  std::size_t a = 0, b = 0;         // in the adapter's catalog
  std::optional<std::size_t> onto;  // likewise: the weight as the adapter has it whole
  Index rank = 1;
  float scaling = 0;
  bool is_transposed = false;         // what is added is the product's transpose
  bool is_rounded_to_weight = false;  // to the weight's dtype, before it is added
  Index experts = 1;
  Index expert = 0;     // whose matrix the weight is; -1: its first dimension are the experts
  Index first_row = 0;  // of the product (or its transpose), that is added to the weight's first row
};

// A weight that the adapter has whole, of a module that was trained (modules_to_save) or a bias.
struct Replaced {
  std::size_t weight = 0;  // in the view
  std::size_t by = 0;      // in the adapter's catalog
};

// Rows of a weight that were trained by themselves, and stand instead of what they were (trainable_token_indices).
struct TrainedRows {
  std::size_t weight = 0;   // in the view
  std::size_t by = 0;       // in the adapter's catalog
  std::vector<Index> rows;  // of the weight, each of its rows is instead of
};

struct Adapter {
  std::string config;            // adapter_config.json
  bool changes_nothing = false;  // its alpha is 0
  // Empty where it is not to be merged.
  std::vector<LowRank> added;
  std::vector<Replaced> replaced;
  std::vector<TrainedRows> trained_rows;

  bool is_merged() const { return !added.empty() || !replaced.empty() || !trained_rows.empty(); }
  std::vector<std::size_t> operands() const;  // in the adapter's catalog, ascending
};

// What is done with an adapter: nothing, written beside the model, added to it.
enum class AdapterUse { kNone, kWritten, kMerged };

// The adapter of a source, or the one that was given, but for what `selection` leaves out: of the source's own, too,
// what it does not ask for. Nothing where there is none. Errors name what does not fit: a
// pair of which one is missing, a rank that the config denies, matrices of no weight of `view` or of another shape. A
// usage error where nothing says the alpha. Unsupported: whatever is neither a pair's, nor a whole weight, nor rows of
// one, and an embedding or head of a model that ties them, which would be one no longer.
Result<std::optional<Adapter>> read_adapter(Reader& source, const AdapterOptions& options, AdapterUse use,
                                            const Selection& selection, const SourceView& view,
                                            const Translation& names);

// Makes the weights of `source`, the view's, those with the adapter merged, in their own dtype. Refers to both.
void merge_adapter(const Adapter& adapter, TensorSource& stored, TensorSource& operands, ComputedSource& source);

}  // namespace reshard
