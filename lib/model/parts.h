// The parts of a training state: which names are the model's, which its optimizers', which neither's, and what
// frameworks have wrapped around them. After find_parts every tensor and object has a plain key (state_key.h), and
// nothing else looks at wrappers again.
//
//   "app.model.layers.0.attention.wq.weight"            "layers.0.attention.wq.weight"
//   "model._orig_mod.model.layers.0.mlp.up_proj.weight" "model.layers.0.mlp.up_proj.weight"
//   "optim.state.layers.0.attention.wq.weight.exp_avg"  "optimizer.state.layers.0.attention.wq.weight.exp_avg"
//   "optimizer_0.state.net.model.norm.weight.exp_avg"   "optimizer_0.state.model.norm.weight.exp_avg"
//   "layers.0.mlp.up_proj.weight" of a LlamaModel        "model.layers.0.mlp.up_proj.weight"
//   "base_model.model.lm_head.base_layer.weight"        "lm_head.weight"
//   "base_model.model.lm_head.lora_A.default.weight"    "peft_adapter.base_model.model.lm_head.lora_A.weight"
//   "base_model.model.score.original_module.weight"     "score.weight"
//   "base_model.model.score.modules_to_save.default.weight"   "peft_adapter.base_model.model.score.weight"
#pragma once

#include <string>
#include <string_view>

#include "lib/checkpoint/catalog.h"
#include "lib/model/families.h"

namespace reshard {

// A training state may hold several models, each under its own prefix: an average of the weights ("ema."), a reference
// model. The average is other state. Of others none is the model, unless `changes` chooses one.
//
// What a reader gives a plain key itself is taken for the name; models that it lists as parts are those there are. A
// prefix is what wraps the model where most of its names begin with it and, without it, are as a family names them; for
// a model of no known family, where the optimizer has them without it. Names that are all a family's but for its
// base_prefix() (family.h) get that. What lies beside a wrapped model is other state; where all is the model's
// (`is_model`), as in its files, nothing lies beside it. Where `changes` gives a prefix,
// it is the model's: a usage error where no name begins with it. Its renames come first, wherever their whole parts of
// names occur.
Status find_parts(Catalog& catalog, const KeyChanges& changes = {}, bool is_model = false, Families families = {});

// Whether the part of this name (Part::name, or a word of other state) has a plain key; an empty name is all parts.
bool is_of_part(std::string_view key, std::string_view part);

// What to do where none of several models is chosen: a clause after "; ", empty where there is one.
std::string choice_of_part(const Catalog& catalog);

// Whether a parameter is an adapter's (PEFT's lora_A, lora_B, ...) and not the model's. Beside the weights they change
// adapters are other state, under the names of PEFT's own files after "peft_adapter."; so are modules that they have
// whole (modules_to_save).
bool is_adapter(std::string_view key);
inline constexpr std::string_view kAdapterPrefix = "peft_adapter.";
inline constexpr std::string_view kPeftPrefix = "base_model.model.";  // of every name in PEFT's own files

}  // namespace reshard
