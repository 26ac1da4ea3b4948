// SPDX-License-Identifier: Apache-2.0
// Checks a model of no known family against its config.json, using what all transformers models have in common.
#pragma once

#include <string>
#include <string_view>

#include "lib/checkpoint/catalog.h"
#include "lib/model/config.h"

namespace reshard {

// Returns whether the config describes these tensors: if a table of its class lists exactly them (architecture.h), or
// their names if it gives no sizes for this config; otherwise if:
//
//   1. Its vocabulary, width and number of layers are those of the tensors. A model without words is compared by its
//      number of queries or the shape of its patch embedding.
//   2. The names have the structure of transformers' models: a module of numbered layers with something next to it,
//      inside another module unless the config's class has no head.
//
// If only the configs of the model's parts have these numbers ("encoder", "text_config"), one part must match, and
// every part must have its number of layers.
bool is_config_of(const Catalog& catalog, const ModelConfig& config);

// Returns the first component, "model.", that all keys of the model have and no parameter of the config's class has. It
// belongs to a family with similar names: find_parts() has added its base_prefix(), or taken a trainer's "model." for
// it.
std::string foreign_prefix(const Catalog& catalog, const ModelConfig& config);

// Returns whether a parameter has the name that some family gives to its word embedding: "shared.embed_tokens.weight".
bool is_embedding(std::string_view parameter, Families families);

}  // namespace reshard
