// SPDX-License-Identifier: Apache-2.0
// The memory of ranks as a target format: every rank holds its part of each tensor in memory.
//
// To the planner this is a checkpoint like any other. A rank is a file, and its part of a tensor is a row-major extent
// of that file; the extents of one tensor have the same offset in every file. Nothing is stored on disk: the load
// (load.h) maps each part to the caller's memory.
#pragma once

#include <memory>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

// A rank's part of one tensor.
struct HeldTensor {
  std::size_t tensor = 0;       // index in the target's catalog
  Dims shape;                   // of the rank's part
  std::vector<LocalBox> boxes;  // of the whole tensor, with their origins in the part
};

class MemoryTarget : public Target {
 public:
  static Result<std::unique_ptr<MemoryTarget>> lay_out(LayoutRequest request);

  bool wants_crcs() const override { return false; }
  Status seal(const PayloadCrc&, const EmitBytes&) const override { return {}; }

  // Returns the tensors that `rank` holds, in the catalog's order. Parts may be empty; tensors of other pipeline stages
  // are left out.
  std::vector<HeldTensor> held_by(Index rank) const;

  // Returns the file of the first replica of `rank`. The catalog has the fragments of first replicas (layout.h) only,
  // or only those that the requested rank holds.
  std::uint32_t file_of(std::size_t tensor, Index rank) const;
  // Returns the offsets from a rank's file number to the ranks that hold the same boxes of this tensor. Requires a
  // target of all ranks.
  const std::vector<Index>& replica_steps_of(std::size_t tensor) const { return replica_steps_[tensor]; }

  // Return whether `rank` is a first replica, and how many ranks hold the same part of a tensor.
  bool is_first_replica(std::size_t tensor, Index rank) const;
  Index copies(std::size_t tensor) const;

  // Returns the tensor whose extents begin at `offset`. Empty tensors are never returned.
  std::size_t tensor_at(Index offset) const;

  const Mesh& mesh() const { return mesh_; }

 private:
  explicit MemoryTarget(LayoutRequest request);
  Status add(const TargetTensor& wanted, Index offset);
  bool is_of_one_rank() const { return rank_.has_value(); }

  Mesh mesh_;
  std::optional<Index> rank_;
  std::vector<SharedPlacement> placements_;        // of the catalog's tensors
  std::vector<std::vector<Index>> replica_steps_;  // of the catalog's tensors; empty in a target of one rank
  std::vector<Index> offsets_;                     // likewise
};

extern const Format kMemoryFormat;

}  // namespace reshard
