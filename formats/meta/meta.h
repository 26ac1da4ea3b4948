// SPDX-License-Identifier: Apache-2.0
// Meta's files of Llama models, and Mistral's files, which have the same tensor names and row order.
//
//   consolidated.00.pth          torch.save of a dict with the tensors of model-parallel rank 0
//   consolidated.01.pth ...      of the other ranks (llama/generation.py, sorted by name)
//   consolidated.pth             of a single rank, written by other programs, also without a params.json
//   params.json                  {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, ...}
//
//   consolidated.safetensors     Mistral: whole tensors in one file, or in several:
//   consolidated-00001-of-00051.safetensors ... with consolidated.safetensors.index.json
//   params.json                  {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, ...}
//
// The ranks' parts join as the modules are cut (llama/model.py, fairscale's model-parallel layers):
//
//   attention.{wq,wk,wv}, feed_forward.{w1,w3}, output    by rows
//   attention.wo, feed_forward.w2                         by columns
//   tok_embeddings                                        by rows in Llama 3, by columns in Llama 1 and 2; its shape
//                                                         shows which
//   norms, rope.freqs                                     whole in every file
#pragma once

#include "lib/base/json.h"
#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kMetaFormat;

namespace meta {

inline constexpr std::string_view kParamsFile = "params.json";

// Returns the rank in "consolidated.07.pth", 0 for "consolidated.pth", nothing for other names.
std::optional<Index> rank_of_file(std::string_view name);
// Returns whether the name is like "consolidated.safetensors" or "consolidated-00001-of-00051.safetensors".
bool is_safetensors_name(std::string_view name);

// Opens a directory, the index, or a file; a rank's file means its directory. Without a config.json, one is made from
// params.json.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// Returns a member of params.json, such as "moe", for which config.json has no equivalent; empty if there is none.
std::string unknown_part(const Json& params);
// Returns the config.json for params.json: a LlamaForCausalLM, or with a hidden_dim, which only Mistral writes, a
// MistralForCausalLM. Missing values (the context length, a vocabulary of -1) are those of the model's generation, or
// are taken from the tensors. `path` is for messages.
Result<Json> make_config(const Json& params, const Catalog& catalog, const std::string& path);

}  // namespace meta
}  // namespace reshard
