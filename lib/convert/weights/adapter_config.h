// SPDX-License-Identifier: Apache-2.0
// adapter_config.json: how the tensors of an adapter change weights (peft/tuners/lora/config.py).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "lib/convert/weights/adapter_operands.h"
#include "lib/convert/weights/module_pattern.h"

namespace reshard {

// The ranks of an adapter's pairs, each with what the pairs of this rank change (AdapterPair::changes).
using AdapterRanks = std::map<Index, std::vector<std::string>>;

class AdapterConfig {
 public:
  // Reads the file next to a checkpoint, or in a directory for the adapter (lora_adapter in verl, adapter in our own
  // outputs, default in PEFT, or the only one that has it), or what diffusers stores instead of it in the header of a
  // safetensors file. Without one, returns a config that is not there.
  static Result<AdapterConfig> find(const Catalog& catalog);

  bool is_there() const { return !path_.empty(); }
  // Returns the alpha that a trainer noted next to a checkpoint without the file.
  std::optional<double> trainers_alpha() const { return trainers_alpha_; }
  const std::optional<Json>& json() const { return json_; }
  // Returns the file's text, with changes that PEFT needs.
  const std::string& text() const { return text_; }

  // Returns whether target_parameters allows a parameter ("mlp.experts.down_proj" with its layer). It allows all if it
  // names none.
  bool allows_parameter(const std::string& parameter) const;

  // Returns whether target_parameters names a parameter ("layers.0.mlp.gate.weight"). PEFT merges it otherwise than a
  // module's weight.
  bool is_target_parameter(const std::string& parameter) const;

  // Fails (unsupported) if the file says that the adapter is of a kind that cannot be merged.
  Status check_mergeable() const;

  // Reads what a merge needs, and `alpha` if the file does not give it. Fails (corrupt) if a rank contradicts the file,
  // (usage) if the alpha is unknown or given twice, (unsupported) if the weights that it fits are not there.
  struct Use {
    std::optional<double> alpha;
    bool is_separate = false, is_beside_weights = false, merges = false;
  };
  Status read(const std::string& where, const AdapterOperands& operands, const AdapterRanks& ranks, const Use& use);

  // Returns the factor of the product of two matrices.
  float scaling_of(const std::string& changed, Index rank) const;
  bool is_fan_in_fan_out() const { return is_fan_in_fan_out_; }
  // Returns the rows, of the `of` rows of a module's weight, that trained rows replace (trainable_token_indices).
  Result<std::vector<Index>> row_numbers(const std::string& module, Index of) const;

  // Returns warnings: pairs that change nothing because their alpha is 0, and those that PEFT would ignore.
  std::vector<std::string> notes(const AdapterOperands& operands, bool merges) const;

 private:
  Status use_json(const Json& json, const AdapterRanks& ranks, const Use& use);
  Status read_alpha(const Json::Member& member);
  Status read_header(const Catalog& catalog);
  Status read_trainers_alpha(const Catalog& catalog);
  std::optional<double> own_alpha(const std::string& changed) const;
  std::vector<std::string> notes_on_zeros(const AdapterOperands& operands) const;
  std::optional<std::string> note_on_unnamed_modules(const AdapterOperands& operands, bool merges) const;

  std::string path_, text_;
  std::optional<Json> json_;
  std::string trainers_path_;  // verl's note of the alpha, if there is no config
  std::optional<double> trainers_alpha_;
  double alpha_ = 0;
  std::vector<std::pair<ModulePattern, double>> alphas_;  // of modules that have another
  bool knows_alphas_ = true;  // false if a member of alpha_pattern cannot be read, which matters only to a merge
  bool is_rooted_ = false;    // rsLoRA: divides by the root of the rank
  bool is_fan_in_fan_out_ = false;
  Json row_numbers_ = Json::array();  // trainable_token_indices
};

}  // namespace reshard
