// A file of named tensors, of whichever kind it is: safetensors (safetensors_header.h) or torch.save (torch_file.h).
// Its first bytes decide, never its name.
//
// A torch.save file holds one value, most often a dict of tensors, or dicts and lists of them inside one another. Each
// tensor is named by its path through them, joined by dots, as Distributed Checkpoint flattens a state_dict:
//
//   {"model": {"w": tensor}, "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]}
//     tensor  model.w
//     objects groups.0.lr, groups.0.betas
//
// Dicts are always taken apart, lists and tuples only where a tensor or a dict is in them. What is left are objects.
// A tensor may be one rank's part of a whole (distributed_tensor.h): the file of a rank holds such.
//
// Safetensors hold no objects, except in ColossalAI's asynchronous saves: there __metadata__.non_tensor_keys is a list,
// as JSON in a string, of entries whose U8 elements are the pickle of an object
// (colossalai/utils/safetensors.py). Its first release, 0.4.7, lists none: there such entries are known by their names,
// "state.<id>.<name>" and "param_groups", and their bytes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "formats/encoding/distributed_tensor.h"
#include "formats/encoding/pickle.h"
#include "formats/encoding/safetensors_header.h"
#include "formats/encoding/stored_tensor.h"
#include "formats/encoding/torch_file.h"
#include "lib/base/file.h"
#include "lib/base/result.h"

namespace reshard {

class TensorFile {
 public:
  struct Entry {
    std::string name;
    KeyPath path;  // a dict's integer keys are decimal text
    StoredTensor tensor;
    std::optional<DistributedTensor> distributed;  // in the place of `tensor`, where Parts::kRead asks for them
  };
  // A value that is no tensor. It refers to the TensorFile.
  struct Object {
    std::string name;
    KeyPath path;
    pickle::Value value;
  };

  static constexpr int kMaxDepth = 64;  // of containers inside one another

  // What becomes of a tensor of which the file holds one rank's part. Refused, one that is all of it is a tensor.
  enum class Parts { kRefuse, kRead };

  // Reads what is in a whole file; no tensor's bytes. Corrupt where a name comes twice, and for what torch_file.h and
  // safetensors_header.h refuse; unsupported where containers are nested deeper than kMaxDepth or hold each other.
  // `end` is for safetensors, `parts` for torch.save. A value that is no container is named "value".
  static Result<TensorFile> open(const File& file, SafetensorsEnd end = SafetensorsEnd::kExact,
                                 Parts parts = Parts::kRefuse);

  const std::vector<Entry>& tensors() const { return tensors_; }  // in the file's order
  const std::vector<Object>& objects() const { return objects_; }
  bool is_torch() const { return is_torch_; }
  const SafetensorsMetadata& metadata() const { return metadata_; }  // empty for torch.save files
  // The value of a torch.save file as a whole; nothing for safetensors.
  std::optional<pickle::Value> root() const;

 private:
  TensorFile() = default;
  Status add_torch(const TorchFile& file, Parts parts);
  Status add_safetensors(const File& file, SafetensorsEnd end);
  Status check_names(const std::string& path) const;

  std::vector<Entry> tensors_;
  std::vector<Object> objects_;
  bool is_torch_ = false;
  SafetensorsMetadata metadata_;
  std::vector<pickle::Document> documents_;  // what the objects refer to
};

}  // namespace reshard
