// SPDX-License-Identifier: Apache-2.0
// Checks a model of no known family against its config.json, using what all transformers models have in common.
#pragma once

#include <string_view>

#include "lib/checkpoint/catalog.h"
#include "lib/model/config.h"

namespace reshard {

// Returns whether the config is that of the tensors: its numbers of words, of its width and of layers are the tensors'
// (of a model without words those of queries, or of what an image's patches are made of), and names are like those that
// a model has in transformers: a module of numbered layers, in another one but where the config's class has no head,
// and something beside it. Where only configs of its parts say them ("encoder", "text_config"): one part's, and every
// part has its number of layers.
bool is_config_of(const Catalog& catalog, const ModelConfig& config);

// Whether a parameter is named as the embedding of words is in some family: "shared.embed_tokens.weight".
bool is_embedding(std::string_view parameter, Families families);

}  // namespace reshard
