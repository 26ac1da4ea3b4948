// Lays out a Hugging Face model in torch.save files, for loaders without safetensors: pytorch_model.bin, or
// pytorch_model-00001-of-00004.bin and so on with pytorch_model.bin.index.json, whose total_size is in bytes.
// (transformers/modeling_utils.py, save_pretrained(safe_serialization=False))
#pragma once

#include <memory>

#include "lib/checkpoint/format.h"

namespace reshard {

// Whole tensors in the request's order, cut into files as `--to hf` cuts them; each file is a dict of its tensors that
// torch.load(weights_only=True, mmap=True) takes. Unsupported for more than one rank.
Result<std::unique_ptr<Target>> lay_out_torch(LayoutRequest request);

}  // namespace reshard
