// SPDX-License-Identifier: Apache-2.0
// torch.save files: one file of any name, or a directory of them as Hugging Face wrote models before safetensors.
//
//   anything.pt                        one file (drawn in formats/encoding/torch_file.h)
//   ckpt.pt, last.ckpt                 the same under a name that other programs use, alone in its directory
//   pytorch_model.bin                  the same under Hugging Face's name
//   pytorch_model-00001-of-00004.bin   whole tensors distributed over several files, and
//   pytorch_model.bin.index.json       {"metadata": {"total_size": N}, "weight_map": {tensor: file}}
//
// (transformers/modeling_utils.py.) The files of diffusers are called "diffusion_pytorch_model". A file holds whatever
// was given to torch.save; tensor_file.h says how values in it are named. If every tensor is below one of the usual
// keys for "the model", the key is left out of the names: {"epoch": 3, "model": {"w": ...}} holds a tensor w.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kBinFormat;

namespace bin {

inline constexpr std::string_view kAdapterFile = "adapter_model.bin";  // PEFT's; not part of a model next to it
bool is_single_name(std::string_view name);  // "pytorch_model.bin", "diffusion_pytorch_model.bin"
bool is_index_name(std::string_view name);   // "pytorch_model.bin.index.json", or a variant's
bool is_variant(std::string_view name);      // "pytorch_model.fp16.bin", "pytorch_model.fp16-00001-of-00002.bin"
// "pytorch_model-00001-of-00004.bin", torchtune's "model-00001-of-00004.bin"
bool is_numbered_name(std::string_view name);
// Returns the files in a directory whose names other programs give to whole models: nanoGPT's "ckpt.pt", Lightning's
// "epoch=3-step=10.ckpt".
std::vector<std::string> usual_names(const PathSnapshot& directory);
// Returns the "global_step" that Lightning records in a file; -1 if the file has none or is damaged.
Result<Index> recorded_step(const std::string& path);

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

}  // namespace bin
}  // namespace reshard
