// SPDX-License-Identifier: Apache-2.0
// The parts of a training state: which names belong to the model, which to its optimizers, which to neither, and how
// frameworks have wrapped them. After find_parts() every tensor and object has a plain key (state_key.h), and no other
// code handles wrappers.
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

// A training state may contain several models with different prefixes: an average of the weights ("ema."), a reference
// model. An average is other state, under a word that says so ("ema.") or that only suggests it ("shadow.") over a
// family's names or those of the rest. If there are several other models, none of them is the model unless `changes`
// chooses one, and names outside all of them are other state.
//
// Finds the parts and plain keys of a catalog. Plain keys and models that the reader sets are kept. A prefix is the
// model's wrapper if most of the model's names begin with it and match a family without it; for a model of no known
// family, if the optimizer's names lack it. If all names lack a family's base_prefix() (family.h), it is added. Names
// outside a wrapped model are other state, but not if `is_model` says that the catalog contains only a model, as its
// files do. A prefix given in `changes` is the model's; a usage error if no name begins with it. The renames in
// `changes` are applied first, to whole components of names.
Status find_parts(Catalog& catalog, const KeyChanges& changes = {}, bool is_model = false, Families families = {});

// Returns whether a catalog is an optimizer's state_dict and nothing more: "state." and "param_groups." without a word
// around them.
bool is_bare_optimizer(const Catalog& catalog);

// Returns whether a plain key belongs to the part of this name (Part::name, or a word of other state). An empty name
// matches all.
bool is_of_part(std::string_view key, std::string_view part);

// Returns a sentence if the only model may be an average of another, by its wrapper ("teacher.") or by torch's counter
// next to it; empty if nothing suggests that, or if an option chose the model.
std::string doubt_about_model(const Catalog& catalog);

// Returns whether a tensor's stored name is under the prefix of an average of the model's weights.
bool is_of_average(const Catalog& catalog, std::string_view name);

// Returns a clause that names the parts to choose from, with the option to add, if several models exist and none was
// chosen, or if only an average exists; otherwise empty.
std::string choice_of_part(const Catalog& catalog);

// Returns whether a parameter belongs to an adapter (PEFT's lora_A, lora_B, ...) and not to the model. If the adapted
// weights are there too, adapters are other state, with the names of PEFT's own files after "peft_adapter."; so are
// modules that adapters contain completely (modules_to_save).
bool is_adapter(std::string_view key);
// Returns whether a parameter is of an adapter as Megatron Bridge and NeMo 2 name it ("linear_qkv.adapter.linear_in",
// "linear_qkv.adapter.adapter_q.linear_out"), which is not merged.
bool is_megatron_adapter(std::string_view key);
inline constexpr std::string_view kAdapterPrefix = "peft_adapter.";
inline constexpr std::string_view kPeftPrefix = "base_model.model.";  // prefix of all names in PEFT's own files
// The tensor of adapters that change no weight (prompt tuning, p-tuning, prefix tuning).
inline constexpr std::string_view kPromptEmbeddings = "prompt_embeddings";
inline constexpr std::string_view kAdapterConfigFile = "adapter_config.json";

}  // namespace reshard
