// SPDX-License-Identifier: Apache-2.0
#include "lib/load/memory_target.h"

#include <algorithm>

#include "lib/base/text.h"

namespace reshard {

MemoryTarget::MemoryTarget(LayoutRequest request) : mesh_(std::move(request.mesh)), rank_(request.rank) {}

Result<std::unique_ptr<MemoryTarget>> MemoryTarget::lay_out(LayoutRequest request) {
  if (request.rank && (*request.rank < 0 || *request.rank >= request.mesh.ranks()))
    return usage_error("rank " + std::to_string(*request.rank) + ": a mesh of " + request.mesh.to_string() +
                       " has ranks 0 to " + std::to_string(request.mesh.ranks() - 1));
  const std::vector<TargetTensor> tensors = std::move(request.tensors);
  std::unique_ptr<MemoryTarget> target(new MemoryTarget(std::move(request)));
  Index bytes = 0;
  for (const TargetTensor& t : tensors) {
    TRY(target->add(t, bytes));
    const auto end = checked_add(bytes, volume(t.shape) * byte_size(t.dtype));
    if (!end) return unsupported(tensor_text(t.name) + ": the model is larger than 2^63 bytes");
    bytes = *end;
  }
  const Index files = target->is_of_one_rank() ? 1 : target->mesh_.ranks();
  for (Index f = 0; f < files; ++f)
    target->catalog_.files.push_back({"memory of rank " + std::to_string(target->rank_.value_or(f)), bytes});
  return target;
}

Status MemoryTarget::add(const TargetTensor& wanted, Index offset) {
  Tensor tensor;
  tensor.name = wanted.name;
  tensor.dtype = wanted.dtype;
  tensor.shape = wanted.shape;
  tensor.path = wanted.path;
  tensor.fragments = FragmentList(wanted.shape.rank());
  tensor.replicas = FragmentList(wanted.shape.rank());
  const auto add_parts = [&](Index rank, std::uint32_t file) {
    const auto boxes = owned_boxes(mesh_, wanted.placement, wanted.shape, rank);
    if (boxes.empty()) return;
    const Dims shape = local_shape(boxes);
    const Index element = byte_size(wanted.dtype);
    for (const LocalBox& b : boxes) {
      if (b.box.empty()) continue;
      Fragment f;
      f.box = b.box;
      f.strides = row_major_strides(shape);
      f.extent = {file, offset, volume(shape) * element};
      for (int d = 0; d < shape.rank(); ++d) f.start += b.at[d] * f.strides[d] * element;
      tensor.fragments.add(f);
    }
  };
  if (rank_) {
    add_parts(*rank_, 0);
  } else {
    for (Index r = 0; r < mesh_.ranks(); ++r)
      if (reshard::is_first_replica(mesh_, wanted.placement, r)) add_parts(r, static_cast<std::uint32_t>(r));
    replica_steps_.push_back(replica_steps(mesh_, wanted.placement));
  }
  placements_.push_back(wanted.placement);
  offsets_.push_back(offset);
  return catalog_.add(std::move(tensor));
}

std::vector<HeldTensor> MemoryTarget::held_by(Index rank) const {
  std::vector<HeldTensor> out;
  for (std::size_t i = 0; i < placements_.size(); ++i) {
    auto boxes = owned_boxes(mesh_, placements_[i], catalog_.tensors()[i].shape, rank);
    if (!boxes.empty()) out.push_back({i, local_shape(boxes), std::move(boxes)});
  }
  return out;
}

std::uint32_t MemoryTarget::file_of(std::size_t tensor, Index rank) const {
  return is_of_one_rank() ? 0 : static_cast<std::uint32_t>(first_replica(mesh_, placements_[tensor], rank));
}

bool MemoryTarget::is_first_replica(std::size_t tensor, Index rank) const {
  return reshard::is_first_replica(mesh_, placements_[tensor], rank);
}

Index MemoryTarget::copies(std::size_t tensor) const { return std::ssize(replica_steps(mesh_, placements_[tensor])); }

std::size_t MemoryTarget::tensor_at(Index offset) const {
  // If several tensors begin here, all but the last are empty.
  return std::upper_bound(offsets_.begin(), offsets_.end(), offset) - offsets_.begin() - 1;
}

const Format kMemoryFormat = {.name = "memory",
                              .title = "the memory of ranks",
                              .recognises = nullptr,
                              .open = nullptr,
                              .lay_out = nullptr,
                              .holds = StateSupport::kTensors,
                              .sharding = Sharding::kLocal};

}  // namespace reshard
