// Ranks as a target: what lies where when every rank holds its part of each tensor in memory.
//
// To the planner this is a checkpoint like any other. A rank is one of its files, a tensor's part is an extent of that
// file, row-major; the extents of one tensor begin at the same offset in every file. Nothing of it is ever on a disk:
// who loads (load.h) gives each part memory of its own.
#pragma once

#include <memory>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

// What a rank holds of one tensor.
struct HeldTensor {
  std::size_t tensor = 0;       // of the target's catalog
  Dims shape;                   // of the rank's part
  std::vector<LocalBox> boxes;  // of the whole tensor, and where they stand in the part
};

class MemoryTarget : public Target {
 public:
  static Result<std::unique_ptr<MemoryTarget>> lay_out(LayoutRequest request);

  bool wants_crcs() const override { return false; }
  Status seal(const PayloadCrc&, const EmitBytes&) const override { return {}; }

  // What `rank` holds, in the catalog's order. Parts may be empty; tensors of other pipeline stages are left out.
  std::vector<HeldTensor> held_by(Index rank) const;

  // The catalog's fragments are those of each first replica (layout.h), or only those that the one rank holds that was
  // asked for. The file of the first replica of `rank`:
  std::uint32_t file_of(std::size_t tensor, Index rank) const;
  // What to add to a file of a target of all ranks to get those who hold what stands there of a tensor.
  const std::vector<Index>& replica_steps_of(std::size_t tensor) const { return replica_steps_[tensor]; }

  // Whether `rank` is a first replica, and how many ranks hold the same of a tensor.
  bool is_first_replica(std::size_t tensor, Index rank) const;
  Index copies(std::size_t tensor) const;

  // The tensor whose extents begin at `offset`. Empty tensors have none.
  std::size_t tensor_at(Index offset) const;

  const Mesh& mesh() const { return mesh_; }

 private:
  explicit MemoryTarget(LayoutRequest request);
  Status add(const TargetTensor& wanted, Index offset);
  bool is_of_one_rank() const { return rank_.has_value(); }

  Mesh mesh_;
  std::optional<Index> rank_;
  std::vector<SharedPlacement> placements_;        // of the catalog's tensors
  std::vector<std::vector<Index>> replica_steps_;  // of the same; empty in a target of one rank
  std::vector<Index> offsets_;                     // of the same
};

extern const Format kMemoryFormat;

}  // namespace reshard
