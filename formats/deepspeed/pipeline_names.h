// SPDX-License-Identifier: Apache-2.0
// Finds the model's names for the parameters of a PipelineModule.
//
// A PipelineModule numbers its layers consecutively, whatever they are, and each layer names its own parameters
// (deepspeed/runtime/pipe/module.py):
//
//   0.word_embeddings.weight                             model.embed_tokens.weight
//   1.input_layernorm.weight ... 4.down_proj.weight      model.layers.0.input_layernorm.weight ...
//   5.weight                                             model.norm.weight
//   6.lm_head.weight                                     lm_head.weight
//
// Layers with the same names are the model's layers. A family matches if each of these names is the end of one of its
// parameters' names, and if the parameters before and after the layers match the family's by their dimensions.
#pragma once

#include <map>
#include <string>

#include "lib/layout/box.h"
#include "lib/model/families.h"
#include "lib/model/family.h"

namespace reshard::deepspeed {

// The result of the search.
struct PipelineNames {
  const Family* family = nullptr;            // null if no known family matches
  std::map<std::string, std::string> names;  // Hugging Face names by name; empty if no known family matches
  std::string evidence;                      // for people; empty if no known family matches
};
PipelineNames name_pipeline(const std::map<std::string, Dims>& parameters, Families families = {});

}  // namespace reshard::deepspeed
