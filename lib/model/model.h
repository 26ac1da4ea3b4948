// Which model a checkpoint holds, and in whose words: decided here, once, for every command.
#pragma once

#include <optional>

#include "lib/model/family.h"

namespace reshard {

// As --family has it.
struct ModelChoice {
  bool detect = true;              // by the config and the tensors' names
  const Family* family = nullptr;  // where not: this one; null: none, names and rows are as they are
  Families families = {};          // that are known: the user's own too
  bool is_none() const { return !detect && !family; }
};

struct Model {
  const Family* family = nullptr;           // null: none that is known, or none is wanted
  Convention convention = Convention::kHf;  // of the tensors' names, where there is a family
  std::optional<ModelConfig> config;        // where there is one, of a known family or not

  bool is_described() const { return family && config; }  // by a config of a known family
  const ModelConfig* config_or_null() const { return config ? &*config : nullptr; }
};

// The family whose table describes the config's model; null where there is none, the model is quantized in a way that
// the family does not know, or its class names its parameters otherwise.
const Family* describing_family(const ModelConfig& config);

// The model of a catalog, and of its config where there is one. What the config says wins over what names suggest: of a
// model that no family describes, or where no tensor is named as in its family, the model has none. Unsupported where
// no tensor is named as in the family that was chosen; a usage error where the config describes a model of another one.
Result<Model> recognise(const Catalog& catalog, const ModelChoice& choice, std::optional<ModelConfig> config);

// The family of a model that is a config alone; `choice` may name it. Unsupported where none is known.
Result<const Family*> family_of(const ModelConfig& config, const ModelChoice& choice = {});

}  // namespace reshard
