// SPDX-License-Identifier: Apache-2.0
#include "lib/load/load_destinations.h"

#include <algorithm>

#include "lib/base/text.h"
#include "lib/source/pieces.h"

namespace reshard {
namespace {

// Returns the steps along each dimension of a row-major part that `elements` elements make.
Dims steps_along(Index elements, const Dims& shape) {
  const Dims strides = row_major_strides(shape);
  Dims steps = strides;
  for (int d = 0; d < shape.rank(); ++d) {
    steps[d] = elements / strides[d];
    elements %= strides[d];
  }
  return steps;
}

Index dot(const Dims& a, const Dims& b) {
  Index sum = 0;
  for (int d = 0; d < a.rank(); ++d) sum += a[d] * b[d];
  return sum;
}

}  // namespace

Status check_strides(const Dims& shape, const Dims& strides, Index element_bytes, const std::string& what) {
  const auto refused = [&](const std::string& why) {
    return usage_error(what + ": strides " + to_string(strides) + " of shape " + to_string(shape) + ": " + why);
  };
  if (strides.rank() != shape.rank())
    return refused("expected " + count_of(shape.rank(), "stride") + ", got " + std::to_string(strides.rank()));
  std::vector<std::pair<Index, Index>> steps;  // stride, extent
  for (int d = 0; d < shape.rank(); ++d) {
    if (shape[d] == 0) return {};
    if (shape[d] > 1) steps.emplace_back(strides[d], shape[d]);
  }
  std::sort(steps.begin(), steps.end());
  Index reach = 0;  // element offset of the furthest element so far
  for (const auto& [stride, extent] : steps) {
    if (stride < 0) return refused("expected no negative stride");
    if (stride <= reach) return refused("expected no two elements at the same address");
    const auto length = checked_mul(stride, extent - 1);
    const auto end = length ? checked_add(reach, *length) : std::nullopt;
    if (!end || !checked_mul(*end, element_bytes)) return refused("expected a reach of at most 2^63 bytes");
    reach = *end;
  }
  return {};
}

Result<LoadDestinations> LoadDestinations::make(const Plan& plan, const Catalog& target_view,
                                                const MemoryTarget& target, Index rank,
                                                const std::vector<HeldTensor>& held,
                                                std::span<const Destination> destinations) {
  std::vector<std::size_t> held_number(target.catalog().tensors().size(), held.size());
  for (std::size_t i = 0; i < held.size(); ++i) held_number[held[i].tensor] = i;
  LoadDestinations out;
  for (const PlannedTensor& planned : plan.tensors) {
    const Tensor& to = target_view.tensors()[planned.to];
    auto destination = std::make_unique<TensorDestination>(to.shape.rank());
    destination->element_bytes = byte_size(to.dtype);
    for (std::size_t i = 0; i < to.fragments.size(); ++i) {
      const Extent& extent = to.fragments.extent(i);
      const std::size_t tensor = target.tensor_at(extent.offset);
      if (extent.file != target.file_of(tensor, rank) || held_number[tensor] == held.size()) continue;
      const HeldTensor& part = held[held_number[tensor]];
      const Destination& memory = destinations[held_number[tensor]];
      const Dims strides = memory.strides.value_or(row_major_strides(part.shape));
      const Fragment f = to.fragments.get(i);
      const Dims first = steps_along(f.start / destination->element_bytes, part.shape);
      Dims last = first, place_strides = f.strides;
      for (int d = 0; d < f.box.rank(); ++d) {
        place_strides[d] = 0;
        if (f.box.shape[d] == 1) continue;
        const Dims step = steps_along(f.strides[d], part.shape);
        for (int k = 0; k < step.rank(); ++k) last[k] += step[k] * (f.box.shape[d] - 1);
        place_strides[d] = dot(step, strides);
      }
      for (int k = 0; k < last.rank(); ++k)
        if (last[k] >= part.shape[k])
          return internal_error(tensor_text(to.name) + " " + to_string(f.box) +
                                " is not aligned with the dimensions of a part of shape " + to_string(part.shape));
      destination->boxes.add(f.box, extent);
      destination->places.push_back({memory.data + dot(first, strides) * destination->element_bytes, place_strides});
    }
    destination->index.emplace(destination->boxes);
    out.destinations_.push_back(std::move(destination));
  }
  return out;
}

Status LoadDestinations::place(std::size_t planned, const Box& box, const std::byte* elements, Stream& stream) const {
  const TensorDestination& destination = *destinations_[planned];
  const Dims strides = row_major_strides(box.shape);
  Status status;
  destination.index->overlapping(box, [&](std::size_t i, const Box& both) {
    if (!status) return;
    const TensorDestination::Place& place = destination.places[i];
    status = stream.copy_box(
        both.shape, destination.element_bytes, elements + offset_in(box, strides, both) * destination.element_bytes,
        strides, place.first + offset_in(destination.boxes.box(i), place.strides, both) * destination.element_bytes,
        place.strides);
  });
  return status;
}

}  // namespace reshard
