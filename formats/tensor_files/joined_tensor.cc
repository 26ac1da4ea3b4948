// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/joined_tensor.h"

#include <cstdint>

#include "formats/encoding/stored_tensor.h"

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
  Fragment f = local;
  f.box = place.box;
  for (int d = 0; d < f.box.rank() && !f.box.empty(); ++d)
    f.start += place.at[d] * f.strides[d] * byte_size(tensor.dtype);
  add(f);
}

void JoinedTensor::add(const Fragment& fragment) {
  Fragment f = fragment;
  if (f.box.empty()) {
    if (tensor.elements() > 0) return;
    // All parts of a tensor without elements are the whole of it.
    f.box = whole(tensor.shape);
    f.strides = row_major_strides(tensor.shape);
  }
  (is_new(f.box) ? tensor.fragments : tensor.replicas).add(f);
}

// Returns whether no fragment has this box, and registers it for the fragment that the caller adds next.
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

Status JoinedTensor::check_same_whole(DType whole_dtype, const Dims& whole_shape) const {
  if (whole_dtype == tensor.dtype && whole_shape == tensor.shape) return {};
  return corrupt("expected a part of " + type_text(tensor.dtype, tensor.shape) +
                 " as in the files of other ranks, got one of " + type_text(whole_dtype, whole_shape));
}

Status check_size(DType dtype, const Dims& shape) {
  const auto elements = checked_volume(shape);
  if (elements && checked_mul(*elements, byte_size(dtype))) return {};
  return corrupt("the size of " + to_string(shape) + " is 2^63 bytes or more");
}

std::optional<Fragment> in_whole(const Fragment& local, const LocalBox& part, Index element_bytes) {
  const Box held = intersect(local.box, {part.at, part.box.shape});
  if (held.empty()) return std::nullopt;
  Fragment out = local;
  out.box.shape = held.shape;
  for (int d = 0; d < held.rank(); ++d) {
    out.start += (held.origin[d] - local.box.origin[d]) * local.strides[d] * element_bytes;
    out.box.origin[d] = part.box.origin[d] + held.origin[d] - part.at[d];
  }
  return out;
}

}  // namespace reshard
