// vLLM's sharded_state: the state of each worker as it is in memory, so that a worker reads its own files and nothing
// else (vllm/model_executor/model_loader/sharded_state_loader.py).
//
//   model-rank-0-part-0.safetensors        tensor-parallel rank 0, cut into parts by size
//   model-rank-0-part-1.safetensors
//   model-rank-1-part-0.safetensors        ...
//   model-pp-0-tp-0-part-0.safetensors     where there are pipeline stages, since vLLM 0.32
//
// The tensors are vLLM's own parameters, so the layout is that of its model classes. Known here is the one that
// Llama, Mistral, Qwen2 and Qwen3 share (vllm/model_executor/models/llama.py, qwen2.py, qwen3.py; layers/linear.py,
// layers/vocab_parallel_embedding.py), unquantized:
//
//   qkv_proj       the worker's query heads, then its key heads, then its value heads. With more workers than key-value
//                  heads, tp / heads of them in a row hold the same one
//   gate_up_proj   the worker's rows of gate_proj, then those of up_proj
//   embed_tokens, lm_head   rows padded with zeros to a multiple of 64, in equal parts; tied ones are stored once, as
//                  lm_head.weight, and by the first of several stages as embed_tokens.weight
//   o_proj, down_proj       columns in equal parts
//   norms, other biases     whole
//   attn._k_scale, ...      four float32 scalars of 1 a layer, since vLLM 0.14
#pragma once

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kVllmFormat;
extern const Format kVllm013Format;  // written for vLLM until 0.13; read as the other

namespace vllm {

struct Worker {
  Index stage = 0, rank = 0;  // of a pipeline; of its tensor-parallel ranks
};
// The file of one part of what a worker of that many stages holds.
std::string file_name(const Worker& worker, Index stages, Index part);

// Read under Hugging Face names, without the padding, as the config.json beside the files says how they are stacked;
// unsupported where there is none.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);
// The mesh is pp and tp. Unsupported, naming the tensor: names of other models, degrees at which vLLM would not run. A
// usage error when tp > 1 and no config says how many heads there are.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);
// The same for vLLM until 0.13, which has no scales and refuses files that do; it has one stage.
Result<std::unique_ptr<Target>> lay_out_without_scales(LayoutRequest request);

}  // namespace vllm
}  // namespace reshard
