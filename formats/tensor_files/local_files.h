// SPDX-License-Identifier: Apache-2.0
// A builder of targets whose files each hold the local tensors of one rank, which are parts of the request's tensors.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "formats/tensor_files/joined_tensor.h"
#include "formats/tensor_files/target.h"
#include "lib/layout/layout.h"

namespace reshard {

// A box of one of the request's tensors, and its position in a local tensor.
struct LocalPart {
  std::size_t tensor = 0;  // in the request
  LocalBox place;
};

// A tensor in a rank's file. Elements that no part fills are zero.
struct LocalTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  std::vector<LocalPart> parts;
  std::string constant = {};  // all of its bytes, for a tensor without parts (safetensors only)
};

// The target while its files are added.
class LocalFiles {
 public:
  // `request` must outlive this object.
  explicit LocalFiles(const LayoutRequest& request);

  // Appends a file with these local tensors.
  Status add_file(std::string name, const std::vector<LocalTensor>& tensors);
  // Appends a file with the local tensors that `list` returns, the same on each call. They are not kept, which saves
  // memory when there are many ranks.
  Status add_file(std::string name, std::function<std::vector<LocalTensor>()> list);
  // Appends a torch.save file whose pickle is more than a dict of the tensors (TensorFilesTarget::add_archive).
  Status add_archive(std::string name, const std::vector<LocalTensor>& tensors, torch_archive::Content content);

  TensorFilesTarget& target() { return *target_; }
  // Returns the finished target. Fails with an internal error unless the files hold every element of the request.
  Result<std::unique_ptr<Target>> finish() &&;

 private:
  void place(const std::vector<LocalTensor>& tensors, const std::vector<Extent>& extents);

  const LayoutRequest& request_;
  std::unique_ptr<TensorFilesTarget> target_ = std::make_unique<TensorFilesTarget>(request_.header_metadata);
  std::vector<JoinedTensor> tensors_;  // of the request, as far as they are stored yet
};

}  // namespace reshard
