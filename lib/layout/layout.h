// Meshes and placements: which box of a tensor a rank owns.
//
// A mesh is named axes, the outermost (slowest) first; rank r's coordinates are r written in the axes' sizes. A tensor
// is cut by a list of splits applied left to right: each split takes what is left of one dimension and hands the ranks
// along its axis torch.chunk's pieces of it (ceil(n / k) each, the last ones smaller or empty). An axis without a split
// replicates.
//
// The order of the splits, not a special placement, is what torch calls _StridedShard: FSDP2 over tensor parallelism
// cuts for TP first and shards each rank's piece afterwards, so on the mesh (dp_shard, tp) a column-parallel weight is
// {tp: 0}, {dp_shard: 0} in that order, and rank (i, j) owns the i-th part of the j-th TP block.
// (torch/distributed/tensor/placement_types.py, Shard and _StridedShard)
//
// A fused tensor is cut section by section: GPT-2's c_attn is q, k and v side by side, and each rank takes its part of
// all three. Its local tensor is then those parts joined, several boxes of the whole; a later split cuts that local
// tensor and not each box.
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

// Every axis there is, in the order of torchtitan's ranks (torchtitan/distributed/parallel_dims.py).
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

  // "tp=4,dp_shard=2": axes in any order; they are put into that of kMeshAxes. At most kMaxMeshRanks.
  static Result<Mesh> parse(std::string_view text);

  const std::vector<MeshAxis>& axes() const { return axes_; }
  Index ranks() const;
  Index size(std::string_view axis) const;  // 1 for an axis that is not there
  // The coordinate of `rank` along `axis`, 0 where the axis is not there.
  Index coordinate(Index rank, std::string_view axis) const;
  Mesh without(std::string_view axis) const;
  std::string to_string() const;  // "dp_shard=2, tp=4"; "one rank"

  friend bool operator==(const Mesh&, const Mesh&) = default;

 private:
  std::vector<MeshAxis> axes_;
};

// Cuts dimension `dim` along one mesh axis, or along several as if they were one (FSDP shards over dp_shard and cp
// together), the first the slowest. What is left of the dimension consists of `groups` equal sections, and each rank
// takes its piece of every one. (Where they cannot be equal, they are torch.chunk's.)
struct Split {
  std::vector<std::string> axes;
  int dim = 0;
  Index groups = 1;

  friend bool operator==(const Split&, const Split&) = default;
};

// "dim 0 by tp, then dim 0 by dp_shard x cp"; with sections "dim 1 in 3 sections by tp"; "whole" where nothing cuts.
std::string to_string(const std::vector<Split>& splits);

// How one tensor lies on a mesh.
struct Placement {
  std::vector<Split> splits;  // applied left to right
  Index stage = -1;           // the pipeline stage that holds the tensor; -1: every stage

  friend bool operator==(const Placement&, const Placement&) = default;
};

// A placement that many tensors have: a model of 100,000 tensors has few. Never null.
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

// torch.chunk: the k-th of n pieces of [0, size) is [begin, end); empty pieces begin and end at `size`.
struct Interval {
  Index begin = 0;
  Index end = 0;
};
Interval chunk(Index size, Index n, Index k);

// A box of the whole tensor, and where it stands in the local tensor of the rank that owns it.
struct LocalBox {
  Box box;
  Dims at;  // the origin in the local tensor

  friend bool operator==(const LocalBox&, const LocalBox&) = default;
};

// What `rank` owns of a tensor of this shape: boxes that tile its local tensor, in row-major order of their places
// there. No box when another pipeline stage holds the tensor. When no element is left for the rank the boxes are empty,
// their origins at the end of the cut dimension, as torch >= 2.8 writes it.
std::vector<LocalBox> owned_boxes(const Mesh& mesh, const Placement& placement, const Dims& shape, Index rank);

// The same for placements without interleaved splits, which give a rank one box; nothing when another pipeline stage
// holds the tensor.
std::optional<Box> owned(const Mesh& mesh, const Placement& placement, const Dims& shape, Index rank);

// The shape of the local tensor that these boxes, at least one, tile.
Dims local_shape(const std::vector<LocalBox>& boxes);

// The first of the ranks that own the same boxes as `rank`: the one whose coordinate is 0 along every axis that
// replicates the tensor. `rank` holds it.
Index first_replica(const Mesh& mesh, const Placement& placement, Index rank);
// Whether `rank` is that one: the one that writes it.
bool is_first_replica(const Mesh& mesh, const Placement& placement, Index rank);
// What to add to a first replica's number to get those of all ranks that own the same boxes, ascending from 0.
std::vector<Index> replica_steps(const Mesh& mesh, const Placement& placement);

}  // namespace reshard
