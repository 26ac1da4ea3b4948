// SPDX-License-Identifier: Apache-2.0
// vLLM's sharded_state (vllm/model_executor/model_loader/sharded_state_loader.py): the state of each worker as it is in
// memory, so that a worker reads only its own files.
//
//   model-rank-0-part-0.safetensors        tensor-parallel rank 0, cut into parts by size
//   model-rank-0-part-1.safetensors
//   model-rank-1-part-0.safetensors        ...
//   model-pp-0-tp-0-part-0.safetensors     with pipeline stages, since vLLM 0.32
//
// The tensors are vLLM's parameters, so their layout depends on the model class. Supported is the layout that Llama,
// Mistral, Qwen2 and Qwen3 share (vllm/model_executor/models/llama.py, qwen2.py, qwen3.py; layers/linear.py,
// layers/vocab_parallel_embedding.py), unquantized:
//
//   qkv_proj       the worker's query heads, then its key heads, then its value heads. With more workers than key-value
//                  heads, tp / heads consecutive workers hold the same head
//   gate_up_proj   the worker's rows of gate_proj, then those of up_proj
//   embed_tokens, lm_head   rows padded with zeros to a multiple of 64, in equal parts. Tied ones are stored once, as
//                  lm_head.weight, and with several stages also as embed_tokens.weight by the first stage
//   o_proj, down_proj       columns in equal parts
//   norms, other biases     whole
//   attn._k_scale, ...      four float32 scalars of 1 a layer, since vLLM 0.14
#pragma once

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kVllmFormat;
extern const Format kVllm013Format;  // for writing for vLLM up to 0.13; kVllmFormat reads it

namespace vllm {

// A worker: its pipeline stage and its tensor-parallel rank.
struct Worker {
  Index stage = 0, rank = 0;
};
// Returns the name of part number `part` of a worker's files, in a run with so many stages.
std::string file_name(const Worker& worker, Index stages, Index part);

// Opens a directory and reads its tensors under Hugging Face names without padding. Fails with kUnsupported without a
// config.json next to the files, which is needed to unstack them.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);
// Lays out files for a mesh of pp and tp. Fails with kUnsupported, naming the tensor, for names of other models and for
// degrees that vLLM does not support. Fails with a usage error if tp > 1 and no config gives the number of heads.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);
// Does the same for vLLM up to 0.13, which refuses files with scales and supports one stage.
Result<std::unique_ptr<Target>> lay_out_without_scales(LayoutRequest request);

}  // namespace vllm
}  // namespace reshard
