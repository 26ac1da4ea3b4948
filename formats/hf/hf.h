// SPDX-License-Identifier: Apache-2.0
// Hugging Face checkpoints: a directory of safetensors files (drawn in formats/encoding/safetensors_header.h).
//
//   model.safetensors                       everything in one file, or
//   model-00001-of-00004.safetensors ...    whole tensors distributed over several files, and
//   model.safetensors.index.json            {"metadata": {"total_size": N}, "weight_map": {tensor: file}}
//   model.fp16.safetensors ...              a variant of the model, read only if it is the only one or is opened
//
// (huggingface_hub/serialization/_torch.py, transformers/modeling_utils.py.) Distributed Checkpoint's Hugging Face
// writer (torch/distributed/checkpoint/hf_storage.py) also writes
//
//   shard-00002-model-00001-of-00001.safetensors    pieces of tensors, a set of files for each rank, no index
//
// where __metadata__["DCP_SHARDING_INFO"] gives the origin of each piece, as JSON inside a JSON string:
// {tensor: {"saved_offsets": [o0, o1, ...], "logical_fqn": name}}. If logical_fqn exists, it is the tensor's name and
// the key in the file is only a label. Global shapes are not stored.
//
// A delta that slime or miles publishes (weight_v000002/, formats/encoding/weight_index.h) has the same files. Each
// tensor that changed is one zstd frame, stored as U8 [its length], of what changed; __metadata__ has the checksum of
// its new bytes under the tensor's name. It is opened as U8 tensors of the decoded bytes, because dtypes and shapes are
// those of the model that it changes (lib/convert/weights/published_delta.h).
#pragma once

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kHfFormat;

namespace hf {

bool is_file_name(std::string_view path);   // ends in ".safetensors"
bool is_index_name(std::string_view path);  // "model.safetensors.index.json", or a variant's

// Opens a file, an index or a directory. With options.files_too = false only the headers need to exist, not the data.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

}  // namespace hf
}  // namespace reshard
