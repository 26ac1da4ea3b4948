// SPDX-License-Identifier: Apache-2.0
// Meshes and placements: which boxes of a tensor a rank owns.
//
// A mesh is a list of named axes, outermost (slowest) first; the coordinates of rank r are the digits of r in the mixed
// radix of the axes' sizes. A placement is a list of splits applied left to right: each split takes the remaining part
// of one dimension and gives each rank along its axis one piece, as torch.chunk cuts it (ceil(n / k) each, the last
// ones smaller or empty). The tensor is replicated along an axis without a split.
//
// The order of the splits expresses what torch calls _StridedShard. FSDP2 over tensor parallelism cuts for TP first and
// then shards each rank's piece, so on the mesh (dp_shard, tp) the splits of a column-parallel weight are {tp: 0},
// {dp_shard: 0} in that order, and rank (i, j) owns the i-th part of the j-th TP block.
// (torch/distributed/tensor/placement_types.py, Shard and _StridedShard)
//
// A fused tensor is cut section by section: GPT-2's c_attn is q, k and v side by side, and each rank takes its part of
// all three. Its local tensor is the concatenation of those parts, which are several boxes of the whole; a later split
// cuts the local tensor, not each box.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/result.h"
#include "lib/layout/box.h"

namespace reshard {

// All axes, in the order of torchtitan's ranks (torchtitan/distributed/parallel_dims.py).
inline constexpr std::array<std::string_view, 6> kMeshAxes = {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"};
inline constexpr Index kMaxMeshRanks = 1'000'000;

struct MeshAxis {
  std::string name;  // one of kMeshAxes
  Index size = 1;

  friend bool operator==(const MeshAxis&, const MeshAxis&) = default;
};

class Mesh {
 public:
  Mesh() = default;  // one rank
  explicit Mesh(std::vector<MeshAxis> axes) : axes_(std::move(axes)) {}

  // Parses "tp=4,dp_shard=2". Axes may be in any order; the mesh has them in the order of kMeshAxes. At most
  // kMaxMeshRanks.
  static Result<Mesh> parse(std::string_view text);

  const std::vector<MeshAxis>& axes() const { return axes_; }
  Index ranks() const;
  Index size(std::string_view axis) const;  // 1 if the mesh lacks the axis
  // Returns the coordinate of `rank` along `axis`, 0 if the mesh lacks the axis.
  Index coordinate(Index rank, std::string_view axis) const;
  Mesh without(std::string_view axis) const;
  std::string to_string() const;  // "dp_shard=2, tp=4"; "one rank"

  friend bool operator==(const Mesh&, const Mesh&) = default;

 private:
  std::vector<MeshAxis> axes_;
};

// Cuts dimension `dim` along one mesh axis, or along several as if they were one (FSDP shards over dp_shard and cp
// together), the first the slowest. The remaining dimension consists of `groups` equal sections, and each rank takes
// its piece of every section. (If they cannot be equal, they are cut as torch.chunk does.)
struct Split {
  std::vector<std::string> axes;
  int dim = 0;
  Index groups = 1;

  friend bool operator==(const Split&, const Split&) = default;
};

// Returns "dim 0 by tp, then dim 0 by dp_shard x cp", with sections "dim 1 in 3 sections by tp", or "whole".
std::string to_string(const std::vector<Split>& splits);

// How one tensor is sharded on a mesh.
struct Placement {
  std::vector<Split> splits;  // applied left to right
  Index stage = -1;           // the pipeline stage that holds the tensor; -1: every stage

  friend bool operator==(const Placement&, const Placement&) = default;
};

// A placement shared by many tensors: a model of 100,000 tensors has only a few. Never null.
class SharedPlacement {
 public:
  SharedPlacement() : placement_(whole()) {}
  SharedPlacement(Placement placement)  // NOLINT(google-explicit-constructor)
      : placement_(std::make_shared<const Placement>(std::move(placement))) {}

  const Placement& operator*() const { return *placement_; }
  const Placement* operator->() const { return placement_.get(); }
  operator const Placement&() const { return *placement_; }  // NOLINT(google-explicit-constructor)
  friend bool operator==(const SharedPlacement& a, const SharedPlacement& b) {
    return a.placement_ == b.placement_ || *a == *b;
  }

 private:
  static const std::shared_ptr<const Placement>& whole();
  std::shared_ptr<const Placement> placement_;
};

// The k-th of n pieces of [0, size) as torch.chunk cuts it: [begin, end). Empty pieces begin and end at `size`.
struct Interval {
  Index begin = 0;
  Index end = 0;
};
Interval chunk(Index size, Index n, Index k);

// A box of the whole tensor and its origin in the local tensor of the rank that owns it.
struct LocalBox {
  Box box;
  Dims at;  // origin in the local tensor

  friend bool operator==(const LocalBox&, const LocalBox&) = default;
};

// Returns the boxes that `rank` owns of a tensor. They tile its local tensor and are in row-major order there. No boxes
// if another pipeline stage holds the tensor. If no element is left for the rank, the boxes are empty and their origins
// are at the end of the cut dimension, as torch >= 2.8 writes it.
std::vector<LocalBox> owned_boxes(const Mesh& mesh, const Placement& placement, const Dims& shape, Index rank);

// Returns the one box that `rank` owns, for placements without interleaved splits, or nothing if another pipeline stage
// holds the tensor.
std::optional<Box> owned(const Mesh& mesh, const Placement& placement, const Dims& shape, Index rank);

// Returns the shape of the local tensor that these boxes tile. Requires at least one box.
Dims local_shape(const std::vector<LocalBox>& boxes);

// Returns the first rank that owns the same boxes as `rank`: the one with coordinate 0 along every axis that replicates
// the tensor. `rank` must hold the tensor.
Index first_replica(const Mesh& mesh, const Placement& placement, Index rank);
// Returns whether `rank` is its own first replica, the rank that writes the boxes.
bool is_first_replica(const Mesh& mesh, const Placement& placement, Index rank);
// Returns the offsets from a first replica to all ranks that own the same boxes, ascending from 0.
std::vector<Index> replica_steps(const Mesh& mesh, const Placement& placement);

}  // namespace reshard
