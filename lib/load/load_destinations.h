// SPDX-License-Identifier: Apache-2.0
// Places loaded elements: maps boxes of the plan's tensors to one rank's memory.
//
// The plan is in terms of canonical tensors; the caller's memory has parts of tensors with the ranks' names and row
// orders, and with strides of its choice. A fragment of the plan's target gives a box's elements as strides in a
// row-major part. Here these become steps along the part's dimensions, and then strides in the caller's memory.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "lib/checkpoint/fragment_index.h"
#include "lib/device/device.h"
#include "lib/load/memory_target.h"
#include "lib/plan/plan.h"

namespace reshard {

// The caller's memory for one rank's part of a tensor.
struct Destination {
  std::byte* data = nullptr;    // first element, on the load's device; needs no alignment
  std::optional<Dims> strides;  // in elements; nothing: row-major
};

// Checks that no two elements of a part share an address and that none is more than 2^63 bytes away. Strides of
// dimensions with one element are ignored. `what` begins the message.
Status check_strides(const Dims& shape, const Dims& strides, Index element_bytes, const std::string& what);

class LoadDestinations {
 public:
  // `target_view` is the view of `target` in the plan, `held` is what `rank` holds of the target, and `destinations`
  // has the memory for each of these. Only that memory must outlive the result.
  static Result<LoadDestinations> make(const Plan& plan, const Catalog& target_view, const MemoryTarget& target,
                                       Index rank, const std::vector<HeldTensor>& held,
                                       std::span<const Destination> destinations);

  // Returns the boxes of planned tensor `planned` in this rank's memory; they do not overlap.
  const FragmentList& boxes(std::size_t planned) const { return destinations_[planned]->boxes; }

  // Queues copies of the part of `box` that this rank holds. The elements are row-major in the target's dtype on the
  // stream's device. Thread-safe for boxes that do not overlap.
  Status place(std::size_t planned, const Box& box, const std::byte* elements, Stream& stream) const;

 private:
  // The destination of one planned tensor.
  struct TensorDestination {
    struct Place {
      std::byte* first;
      Dims strides;
    };
    explicit TensorDestination(int rank) : boxes(rank) {}
    Index element_bytes = 1;
    FragmentList boxes;
    std::vector<Place> places;  // of the boxes
    std::optional<FragmentIndex> index;
  };

  std::vector<std::unique_ptr<TensorDestination>> destinations_;
};

}  // namespace reshard
