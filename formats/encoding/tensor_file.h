// SPDX-License-Identifier: Apache-2.0
// A file of named tensors in safetensors (safetensors_header.h) or torch.save (torch_file.h). The first bytes of the
// file decide which it is, not its name.
//
// A torch.save file holds one value, usually a dict of tensors or nested dicts and lists of them. A tensor's name is
// its path through these containers, joined by dots, as Distributed Checkpoint flattens a state_dict:
//
//   {"model": {"w": tensor}, "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]}
//     tensor  model.w
//     objects groups.0.lr, groups.0.betas
//
// Dicts are always flattened, lists and tuples only if they contain a tensor or a dict. All other values are objects.
// A tensor may be one rank's part of a whole (distributed_tensor.h).
//
// Safetensors files hold no objects, except those of ColossalAI's asynchronous saves: there
// __metadata__.non_tensor_keys is a JSON list, in a string, of entries whose U8 elements are the pickle of an object
// (colossalai/utils/safetensors.py). The first release with such saves, 0.4.7, does not list them: there these entries
// are recognised by their names, "state.<id>.<name>" and "param_groups", and by their bytes.
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

// The tensors and objects of a file that was read.
class TensorFile {
 public:
  struct Entry {
    std::string name;
    KeyPath path;  // a dict's integer keys are decimal text
    StoredTensor tensor;
    std::optional<DistributedTensor> distributed = {};  // instead of `tensor`, with Parts::kRead
    std::optional<Error> refusal = {};                  // why `tensor` has no bytes, with Parts::kDefer
  };
  // A value that is not a tensor. The TensorFile owns it.
  struct Object {
    std::string name;
    KeyPath path;
    pickle::Value value;
  };

  static constexpr int kMaxDepth = 64;  // levels of nested containers

  // How to treat a tensor of which the file holds one rank's part. With kRefuse, a part that is the whole is still
  // read, as a tensor. kDefer does the same, and lists tensors that a class computes with the reason for which they
  // cannot be read; otherwise such a tensor refuses the file.
  enum class Parts { kRefuse, kRead, kDefer };

  // Reads which tensors and objects a file holds, without the tensors' bytes. `end` is for safetensors, `parts` for
  // torch.save. A value that is not in a container is named "value". Fails with kCorrupt if a name occurs twice, with
  // kUnsupported if containers are nested deeper than kMaxDepth or contain each other, and as torch_file.h and
  // safetensors_header.h say.
  static Result<TensorFile> open(const File& file, SafetensorsEnd end = SafetensorsEnd::kExact,
                                 Parts parts = Parts::kRefuse);

  const std::vector<Entry>& tensors() const { return tensors_; }  // in the file's order
  const std::vector<Object>& objects() const { return objects_; }
  bool is_torch() const { return is_torch_; }
  const SafetensorsMetadata& metadata() const { return metadata_; }  // empty for torch.save files
  // Returns the whole value of a torch.save file; nothing for safetensors.
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
  std::vector<pickle::Document> documents_;  // own the objects
};

}  // namespace reshard
