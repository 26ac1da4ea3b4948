// The index of a checkpoint that was cut into several files: which tensor is in which.
//
//   {"metadata": {"total_size": 2471645608},
//    "weight_map": {"model.embed_tokens.weight": "model-00001-of-00004.safetensors", ...}}
//
// Hugging Face's (huggingface_hub/serialization/_torch.py) counts total_size in bytes and sorts the names. ColossalAI's
// (colossalai/checkpoint_io/index_file.py) counts MiB, as a float, and keeps the order of the model; that of an
// optimizer maps the decimal ids of parameters, and its metadata names the file of the parameter groups.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/result.h"

namespace reshard {

class WeightIndex {
 public:
  struct Entry {
    std::string name;  // of the tensor
    std::string file;  // relative to the index's directory, and inside it
  };

  // Reads an index file. Names that come twice, and files outside the directory, are corrupt.
  static Result<WeightIndex> read(const std::string& path);
  // The same from a text; `path` is for messages.
  static Result<WeightIndex> parse(std::string_view text, const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<Entry>& entries() const { return entries_; }  // in the index's order
  std::optional<std::size_t> find(const std::string& name) const;
  std::vector<std::string> files() const;  // each once, sorted
  // metadata.total_size as it stands there; null where there is none.
  const Json& total_size() const { return total_size_; }
  // metadata.param_groups, a file inside the directory; empty where there is none.
  const std::string& param_groups() const { return param_groups_; }

 private:
  std::string path_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::size_t> by_name_;
  Json total_size_;
  std::string param_groups_;
};

}  // namespace reshard
