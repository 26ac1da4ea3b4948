// SPDX-License-Identifier: Apache-2.0
// Decides which model a checkpoint holds, and in which naming convention; once, for every command.
#pragma once

#include <optional>

#include "lib/model/family.h"

namespace reshard {

// The user's choice with --family.
struct ModelChoice {
  bool detect = true;                         // from the config and the tensors' names
  const Family* family = nullptr;             // if not detected; null: none, names and rows stay as they are
  std::optional<Convention> convention = {};  // --source-names: of the source's names; nothing: detected
  Families families = {};                     // the candidates, including the user's own
  bool is_none() const { return !detect && !family; }
};

struct Model {
  const Family* family = nullptr;           // null: unknown, or not wanted
  Convention convention = Convention::kHf;  // of the tensors' names, if there is a family
  std::optional<ModelConfig> config;        // if there is one, of a known family or not

  bool is_described() const { return family && config; }  // a config of a known family
  const ModelConfig* config_or_null() const { return config ? &*config : nullptr; }
};

// Returns the family whose table describes the config's model. Null if there is none, if the family does not know the
// model's quantization, or if the model's class has other parameter names.
const Family* describing_family(const ModelConfig& config);

// Recognises the model of a catalog and its config, if any. A usage error if the names are not of `choice.convention`.
// The config takes precedence over names: if no family describes its model, or no tensor is named as in that family,
// the result has no family. Unsupported if no tensor is named as in the chosen family; a usage error if the config
// describes a model of another family.
Result<Model> recognise(const Catalog& catalog, const ModelChoice& choice, std::optional<ModelConfig> config);

// Returns the family of a model given only by a config; `choice` may name it. If no family describes the model, its
// class_family(). Unsupported if there is none.
Result<const Family*> family_of(const ModelConfig& config, const ModelChoice& choice = {});

}  // namespace reshard
