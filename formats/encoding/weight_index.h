// SPDX-License-Identifier: Apache-2.0
// The index of a checkpoint in several files, which says which tensor is in which file.
//
//   {"metadata": {"total_size": 2471645608},
//    "weight_map": {"model.embed_tokens.weight": "model-00001-of-00004.safetensors", ...}}
//
// "model.safetensors.index.json" is the index of the model "model". Models are published in variants too, which loaders
// read only if they are asked to (transformers' _add_variant): "model.safetensors.index.fp16.json" names
// "model.fp16-00001-of-00002.safetensors". Older programs wrote "model.safetensors.fp16.index.json" and
// "model-00001-of-00002.fp16.safetensors".
//
// Hugging Face (huggingface_hub/serialization/_torch.py) gives total_size in bytes and sorts the names. ColossalAI
// (colossalai/checkpoint_io/index_file.py) gives it in MiB, as a float, and keeps the order of the model. ColossalAI's
// index of an optimizer maps parameter ids in decimal, and its metadata names the file of the parameter groups.
//
// slime, miles and SGLang publish what a training step changed as such files (slime/backends/megatron_utils/
// update_weight/update_weight_from_disk_delta.py; sglang/srt/weight_sync/disk_delta.py), whose metadata is
//
//   {"version": "000002", "base_version": "000001", "delta_encoding": "xor", "compression_format": "zstd",
//    "checksum_format": "xxh3-128"}
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/result.h"

namespace reshard {

// The parts of an index's name.
struct WeightIndexName {
  std::string stem;     // of the model's files: "model"
  std::string variant;  // "fp16"; empty for the model itself
};

// Parses the name of an index of files that end in `ending` (".safetensors", ".bin").
std::optional<WeightIndexName> parse_weight_index_name(std::string_view name, std::string_view ending);

// Returns whether a file has the name of a variant of the model whose files begin with `stem` and end in `ending`:
// "model.fp16.safetensors", "model.fp32-00001-of-00002.safetensors".
bool is_variant_name(std::string_view name, std::string_view stem, std::string_view ending);

// An index that was read.
class WeightIndex {
 public:
  struct Entry {
    std::string name;  // of the tensor
    std::string file;  // relative to the index's directory and inside it
  };

  // Reads an index file. Fails with kCorrupt if a name occurs twice or a file is outside the directory.
  static Result<WeightIndex> read(const std::string& path);
  // Parses the text of an index; `path` is for messages.
  static Result<WeightIndex> parse(std::string_view text, const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<Entry>& entries() const { return entries_; }  // in the index's order
  std::optional<std::size_t> find(const std::string& name) const;
  std::vector<std::string> files() const;  // each once, sorted
  // Returns metadata.total_size as given, or null if it is missing.
  const Json& total_size() const { return total_size_; }
  // Returns metadata.param_groups, a file inside the directory, or an empty text if it is missing.
  const std::string& param_groups() const { return param_groups_; }
  // Returns the texts of the metadata if the files hold a published delta: they include delta_encoding. Empty
  // otherwise.
  const std::vector<std::pair<std::string, std::string>>& delta() const { return delta_; }

 private:
  std::string path_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::size_t> by_name_;
  Json total_size_;
  std::string param_groups_;
  std::vector<std::pair<std::string, std::string>> delta_;
};

}  // namespace reshard
