// torch.save files: one file of any name, or a directory of them as Hugging Face cut models before safetensors.
//
//   anything.pt                        one file (formats/encoding/torch_file.h draws it)
//   ckpt.pt, last.ckpt                 the same, by names usual elsewhere, in a directory with one of them
//   pytorch_model.bin                  the same, by its usual name in a directory
//   pytorch_model-00001-of-00004.bin   whole tensors dealt out over several files, and
//   pytorch_model.bin.index.json       {"metadata": {"total_size": N}, "weight_map": {tensor: file}}
//
// (transformers/modeling_utils.py.) Those of diffusers are "diffusion_pytorch_model". A file holds whatever was given
// to torch.save; tensor_file.h says how values in it are named. Where every tensor of a file lies under one of the
// usual words for "the model", that word is left out of the names: {"epoch": 3, "model": {"w": ...}} holds a tensor w.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kBinFormat;

namespace bin {

inline constexpr std::string_view kAdapterFile = "adapter_model.bin";  // PEFT's; beside a model no part of it
bool is_single_name(std::string_view name);    // "pytorch_model.bin", "diffusion_pytorch_model.bin"
bool is_index_name(std::string_view name);     // ends in ".bin.index.json"
bool is_numbered_name(std::string_view name);  // "pytorch_model-00001-of-00004.bin"
// Of a directory the files that have names which others give to whole models: nanoGPT's "ckpt.pt", Lightning's
// "epoch=3-step=10.ckpt".
std::vector<std::string> usual_names(const PathSnapshot& directory);

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

}  // namespace bin
}  // namespace reshard
