// Where what is loaded lands: the parts of tensors that one rank's memory holds, for boxes of the plan's tensors.
//
// The plan speaks of canonical tensors, the caller's memory of parts of tensors as the ranks name and order them, in
// strides of the caller's choice. A fragment of the plan's target says which elements of a row-major part a box is;
// here that becomes steps along the part's dimensions, and those become steps in the caller's memory.
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

// Memory for one rank's part of a tensor, the caller's.
struct Destination {
  std::byte* data = nullptr;    // its first element, on the device that the load is for; without any alignment
  std::optional<Dims> strides;  // elements from one to the next in each dimension; nothing: row-major
};

// That no two elements of a part of this shape share a place, and that none is more than 2^63 bytes away. Strides of
// dimensions of one element do not matter. `what` begins the message.
Status check_strides(const Dims& shape, const Dims& strides, Index element_bytes, const std::string& what);

class LoadDestinations {
 public:
  // `target_view` is the view of `target` that the plan goes to, `held` what `rank` holds of the target, and
  // `destinations` the memory for each of these. Refers to nothing but that memory afterwards.
  static Result<LoadDestinations> make(const Plan& plan, const Catalog& target_view, const MemoryTarget& target,
                                       Index rank, const std::vector<HeldTensor>& held,
                                       std::span<const Destination> destinations);

  // The boxes of planned tensor `planned` that land here; they do not overlap.
  const FragmentList& boxes(std::size_t planned) const { return destinations_[planned]->boxes; }

  // Queues the copying of what lands here of `box`, whose elements, of the target's dtype, lie row-major on the
  // stream's device. Thread-safe for boxes that do not overlap.
  Status place(std::size_t planned, const Box& box, const std::byte* elements, Stream& stream) const;

 private:
  // Of one planned tensor.
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
