// Lays out a model as ColossalAI's Booster saves one with shard=True, for its CheckpointIO to load.
//
//   model-00001.safetensors                       always a counter, never "-of-"
//   model-stage-00001-shard-00001.safetensors     with a pipeline: the tensors of stage 1
//   model.safetensors.index.json                  {"metadata": {"total_size": MiB}, "weight_map": {tensor: file}}
//
// or pytorch_model-00001.bin and so on with pytorch_model.bin.index.json in the torch.save container. Files hold whole
// tensors under Hugging Face names whatever the degree of tensor parallelism: the loader cuts them itself.
// (colossalai/checkpoint_io/utils.py, general_checkpoint_io.py, hybrid_parallel_checkpoint_io.py)
#pragma once

#include <memory>

#include "lib/checkpoint/format.h"

namespace reshard {

// Unsupported for a mesh with another axis than pp.
Result<std::unique_ptr<Target>> lay_out_colossalai(LayoutRequest request);

}  // namespace reshard
