// Hugging Face checkpoints: a directory of safetensors files (formats/encoding/safetensors_header.h draws one).
//
//   model.safetensors                       everything in one file, or
//   model-00001-of-00004.safetensors ...    whole tensors dealt out over several files, and
//   model.safetensors.index.json            {"metadata": {"total_size": N}, "weight_map": {tensor: file}}
//
// (huggingface_hub/serialization/_torch.py, transformers/modeling_utils.py.) Distributed Checkpoint's Hugging Face
// writer also leaves
//
//   shard-00002-model-00001-of-00001.safetensors    pieces of tensors, one set of files a rank, no index
//
// where __metadata__["DCP_SHARDING_INFO"] gives the origin of each piece, as JSON inside a JSON string:
// {tensor: {"saved_offsets": [o0, o1, ...], "logical_fqn": name}}; with logical_fqn the key in the file is only a label
// and logical_fqn is the tensor. Global shapes are not stored. (torch/distributed/checkpoint/hf_storage.py)
#pragma once

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kHfFormat;

namespace hf {

bool is_file_name(std::string_view path);   // ends in ".safetensors"
bool is_index_name(std::string_view path);  // ends in ".safetensors.index.json"

// Of a file, an index or a directory. With options.files_too = false the headers have to be there, the data
// behind them need not.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

}  // namespace hf
}  // namespace reshard
