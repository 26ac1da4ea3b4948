// What the parameters of a PipelineModule are in the model.
//
// Its layers are numbered through, whatever they are, and each names its parameters by itself:
//
//   0.word_embeddings.weight                             model.embed_tokens.weight
//   1.input_layernorm.weight ... 4.down_proj.weight      model.layers.0.input_layernorm.weight ...
//   5.weight                                             model.norm.weight
//   6.lm_head.weight                                     lm_head.weight
//
// Layers that have the same names are the model's layers. A family has them where each of those is the end of one of
// its parameters' names, and where what stands before and behind is what it has there, by dimensions.
#pragma once

#include <map>
#include <string>

#include "lib/layout/box.h"
#include "lib/model/families.h"
#include "lib/model/family.h"

namespace reshard::deepspeed {

struct PipelineNames {
  const Family* family = nullptr;            // null: none that is known has them
  std::map<std::string, std::string> names;  // of each, its Hugging Face name; empty: no family that is known has them
  std::string evidence;                      // a phrase for people; empty likewise
};
PipelineNames name_pipeline(const std::map<std::string, Dims>& parameters, Families families = {});

}  // namespace reshard::deepspeed
