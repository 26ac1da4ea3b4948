// Meta's own files of Llama models, and Mistral's of theirs, which have the same names and rows.
//
//   consolidated.00.pth          torch.save of a dict, the tensors of model-parallel rank 0
//   consolidated.01.pth ...      (llama/generation.py: sorted by name)
//   consolidated.pth             of one rank, as others write it; without a params.json too
//   params.json                  {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256,
//   ...}
//
//   consolidated.safetensors     Mistral's: whole tensors in one file, or in several,
//   consolidated-00001-of-00051.safetensors ... with consolidated.safetensors.index.json
//   params.json                  {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, ...}
//
// How the parts of ranks join is in the modules that hold them (llama/model.py, fairscale's model-parallel layers):
//
//   attention.{wq,wk,wv}, feed_forward.{w1,w3}, output    rows
//   attention.wo, feed_forward.w2                         columns
//   tok_embeddings                                        rows in Llama 3, columns in Llama 1 and 2: its shape tells
//   norms, rope.freqs                                     whole in every file
#pragma once

#include "lib/base/json.h"
#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kMetaFormat;

namespace meta {

inline constexpr std::string_view kParamsFile = "params.json";

// The rank in "consolidated.07.pth", 0 of "consolidated.pth"; nothing for other names.
std::optional<Index> rank_of_file(std::string_view name);
// "consolidated.safetensors", "consolidated-00001-of-00051.safetensors"
bool is_safetensors_name(std::string_view name);

// Of a directory, the index, or one of the files, which stands for the directory if it is a rank's. A
// config.json that is not there is made of params.json.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// What says that no config.json can be made: "moe", a member of params.json; empty where one can.
std::string unknown_part(const Json& params);
// The config.json of the model that params.json describes: LlamaForCausalLM, or with a hidden_dim, which only Mistral
// writes, MistralForCausalLM. `path` is for messages. What is not there (a context length, a vocabulary of -1) is the
// model generation's, or is looked up in the tensors.
Result<Json> make_config(const Json& params, const Catalog& catalog, const std::string& path);

}  // namespace meta
}  // namespace reshard
