#include "formats/tensor_files/local_files.h"

#include "lib/base/text.h"

namespace reshard {

LocalFiles::LocalFiles(const LayoutRequest& request) : request_(request), stored_(request.tensors.size()) {
  for (const TargetTensor& wanted : request.tensors) {
    Tensor tensor;
    tensor.name = wanted.name;
    tensor.dtype = wanted.dtype;
    tensor.shape = wanted.shape;
    tensor.path = wanted.path;
    tensor.fragments = FragmentList(wanted.shape.rank());
    tensor.replicas = FragmentList(wanted.shape.rank());
    tensors_.push_back(std::move(tensor));
  }
}

Status LocalFiles::add_file(std::string name, const std::vector<LocalTensor>& tensors) {
  std::vector<FileTensor> stored;
  for (const LocalTensor& t : tensors) stored.push_back({t.name, t.dtype, t.shape, {}});
  const auto extents = TRY(target_->add_file(std::move(name), request_.container, std::move(stored)));
  for (std::size_t i = 0; i < tensors.size(); ++i)
    for (const LocalPart& part : tensors[i].parts) add_part(tensors[i], part, extents[i]);
  return {};
}

void LocalFiles::add_part(const LocalTensor& local, const LocalPart& part, const Extent& extent) {
  Tensor& tensor = tensors_[part.tensor];
  const Box& box = part.place.box;
  // An empty tensor is stored once, as itself.
  if (box.empty() && !(tensor.elements() == 0 && tensor.fragments.empty())) return;
  Fragment f;
  f.box = box.empty() ? whole(tensor.shape) : box;
  f.strides = row_major_strides(local.shape);
  f.extent = extent;
  for (int d = 0; d < box.rank(); ++d) f.start += part.place.at[d] * f.strides[d] * byte_size(tensor.dtype);
  const bool is_new = stored_[part.tensor].insert(box).second;
  (is_new ? tensor.fragments : tensor.replicas).add(f);
}

Result<std::unique_ptr<Target>> LocalFiles::finish() && {
  for (Tensor& tensor : tensors_) {
    TRY(check_cover(tensor));
    TRY(target_->catalog().add(std::move(tensor)));
  }
  return std::unique_ptr<Target>(std::move(target_));
}

}  // namespace reshard
