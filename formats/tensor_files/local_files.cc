#include "formats/tensor_files/local_files.h"

#include <cstdint>

#include "lib/base/text.h"

namespace reshard {

JoinedTensor::JoinedTensor(std::string name, DType dtype, const Dims& shape, KeyPath path) {
  tensor.name = std::move(name);
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.path = std::move(path);
  tensor.fragments = FragmentList(shape.rank());
  tensor.replicas = FragmentList(shape.rank());
}

void JoinedTensor::add(const Dims& local_shape, const LocalBox& place, const Extent& extent) {
  Fragment local;
  local.box = whole(local_shape);
  local.strides = row_major_strides(local_shape);
  local.extent = extent;
  add(local, place);
}

void JoinedTensor::add(const Fragment& local, const LocalBox& place) {
  const Box& box = place.box;
  // An empty tensor is stored once, as itself.
  if (box.empty() && !(tensor.elements() == 0 && tensor.fragments.empty())) return;
  Fragment f = local;
  f.box = box.empty() ? whole(tensor.shape) : box;
  if (box.empty()) f.strides = row_major_strides(f.box.shape);
  for (int d = 0; d < box.rank() && !box.empty(); ++d) f.start += place.at[d] * f.strides[d] * byte_size(tensor.dtype);
  (is_new(f.box) ? tensor.fragments : tensor.replicas).add(f);
}

// Whether no fragment has this box. It is that of the next one then.
bool JoinedTensor::is_new(const Box& box) {
  const auto hash_of = [](const Box& b) {
    std::uint64_t hash = 0;
    for (const Dims* const dims : {&b.origin, &b.shape})
      for (const Index n : *dims) hash = (hash ^ static_cast<std::uint64_t>(n)) * 0xff51afd7ed558ccd;
    return hash ^ hash >> 32;
  };
  const FragmentList& known = tensor.fragments;
  if (by_box_.find(hash_of(box), [&](std::size_t i) { return known.box(i) == box; })) return false;
  by_box_.add([&](std::size_t i) { return hash_of(i < known.size() ? known.box(i) : box); });
  return true;
}

LocalFiles::LocalFiles(const LayoutRequest& request)
    : request_(request), tensors_(request.tensors.begin(), request.tensors.end()) {}

namespace {

std::vector<FileTensor> stored_as(const std::vector<LocalTensor>& tensors) {
  std::vector<FileTensor> out;
  out.reserve(tensors.size());
  for (const LocalTensor& t : tensors) out.push_back({t.name, t.dtype, t.shape, {}});
  return out;
}

}  // namespace

Status LocalFiles::add_file(std::string name, const std::vector<LocalTensor>& tensors) {
  place(tensors, TRY(target_->add_file(std::move(name), request_.container, stored_as(tensors))));
  return {};
}

Status LocalFiles::add_file(std::string name, std::function<std::vector<LocalTensor>()> tell) {
  const std::vector<LocalTensor> tensors = tell();
  const auto tell_stored = [tell = std::move(tell)] { return stored_as(tell()); };
  place(tensors, TRY(target_->add_file(std::move(name), request_.container, stored_as(tensors), tell_stored)));
  return {};
}

Status LocalFiles::add_archive(std::string name, const std::vector<LocalTensor>& tensors,
                               torch_archive::Content content) {
  place(tensors, TRY(target_->add_archive(std::move(name), stored_as(tensors), std::move(content))));
  return {};
}

void LocalFiles::place(const std::vector<LocalTensor>& tensors, const std::vector<Extent>& extents) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].constant.empty()) target_->add_constant(extents[i], tensors[i].constant);
    for (const LocalPart& part : tensors[i].parts) tensors_[part.tensor].add(tensors[i].shape, part.place, extents[i]);
  }
}

Result<std::unique_ptr<Target>> LocalFiles::finish() && {
  for (JoinedTensor& joined : tensors_) {
    TRY(check_cover(joined.tensor));
    TRY(target_->catalog().add(std::move(joined.tensor)));
  }
  return std::unique_ptr<Target>(std::move(target_));
}

}  // namespace reshard
