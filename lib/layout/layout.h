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
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/base/result.h"
#include "lib/layout/box.h"

namespace reshard {

struct MeshAxis {
  std::string name;  // pp, dp_replicate, dp_shard, cp, tp
  Index size = 1;

  friend bool operator==(const MeshAxis&, const MeshAxis&) = default;
};

class Mesh {
 public:
  Mesh() = default;  // one rank
  explicit Mesh(std::vector<MeshAxis> axes) : axes_(std::move(axes)) {}

  // "tp=4,dp_shard=2": axes in any order; they are put into the order of torchtitan's ranks, pp, dp_replicate,
  // dp_shard, cp, tp (torchtitan/distributed/parallel_dims.py). At most a million ranks.
  static Result<Mesh> parse(std::string_view text);

  const std::vector<MeshAxis>& axes() const { return axes_; }
  Index ranks() const;
  Index size(std::string_view axis) const;  // 1 for an axis that is not there
  // The coordinate of `rank` along `axis`, 0 where the axis is not there.
  Index coordinate(Index rank, std::string_view axis) const;
  std::string to_string() const;  // "dp_shard=2, tp=4"; "one rank"

 private:
  std::vector<MeshAxis> axes_;
};

// Cuts dimension `dim` along one mesh axis, or along several as if they were one (FSDP shards over dp_shard and cp
// together), the first the slowest.
struct Split {
  std::vector<std::string> axes;
  int dim = 0;

  friend bool operator==(const Split&, const Split&) = default;
};

// How one tensor lies on a mesh.
struct Placement {
  std::vector<Split> splits;  // applied left to right
  Index stage = -1;           // the pipeline stage that holds the tensor; -1: every stage

  friend bool operator==(const Placement&, const Placement&) = default;
};

// torch.chunk: the k-th of n pieces of [0, size) is [begin, end); empty pieces begin and end at `size`.
struct Interval {
  Index begin = 0;
  Index end = 0;
};
Interval chunk(Index size, Index n, Index k);

// The box of `shape` that `rank` owns; nothing when another pipeline stage holds the tensor. It may be empty. Its
// origin is then at the end of the cut dimension, as torch >= 2.8 writes it.
std::optional<Box> owned(const Mesh& mesh, const Placement& placement, const Dims& shape, Index rank);

// Whether `rank` is the first of the ranks that own the same box: its coordinate is 0 along every axis that replicates
// the tensor. The one that writes it.
bool is_first_replica(const Mesh& mesh, const Placement& placement, Index rank);

}  // namespace reshard
