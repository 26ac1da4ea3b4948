// Builds a target of files that each hold one rank's local tensors, which are parts of the request's tensors.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "formats/tensor_files/joined_tensor.h"
#include "formats/tensor_files/target.h"
#include "lib/layout/layout.h"

namespace reshard {

// A box of one of the request's tensors, at its place in a local tensor.
struct LocalPart {
  std::size_t tensor = 0;  // in the request
  LocalBox place;
};

// A tensor of a rank's file. What no part fills is zeros.
struct LocalTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  std::vector<LocalPart> parts;
  std::string constant = {};  // all of its bytes, of a tensor in safetensors that has no parts
};

class LocalFiles {
 public:
  // Refers to `request`.
  explicit LocalFiles(const LayoutRequest& request);

  // Appends a file of these local tensors.
  Status add_file(std::string name, const std::vector<LocalTensor>& tensors);
  // Likewise of those that `tell` tells, each time the same ones: they are not kept, as those of many ranks should not
  // be.
  Status add_file(std::string name, std::function<std::vector<LocalTensor>()> tell);
  // Likewise, of torch.save and of more than a dict of them (TensorFilesTarget::add_archive).
  Status add_archive(std::string name, const std::vector<LocalTensor>& tensors, torch_archive::Content content);

  TensorFilesTarget& target() { return *target_; }
  // Ends the target. Its files hold every element of every tensor of the request, or this is an internal error.
  Result<std::unique_ptr<Target>> finish() &&;

 private:
  void place(const std::vector<LocalTensor>& tensors, const std::vector<Extent>& extents);

  const LayoutRequest& request_;
  std::unique_ptr<TensorFilesTarget> target_ = std::make_unique<TensorFilesTarget>(request_.header_metadata);
  std::vector<JoinedTensor> tensors_;  // of the request, as far as they are stored yet
};

}  // namespace reshard
