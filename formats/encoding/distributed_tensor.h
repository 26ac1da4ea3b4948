// SPDX-License-Identifier: Apache-2.0
// One rank's part of a distributed tensor, as torch.save pickles it: a DTensor (FSDP2, tensor parallelism, FSDP1 with a
// device mesh) or a ShardedTensor (FSDP1 without a mesh).
//
//   torch._tensor._rebuild_from_type_v2(torch._utils._rebuild_wrapper_subclass, torch.distributed.tensor.DTensor,
//     (DTensor, torch.bfloat16, (257, 64), (64, 1), 0, layout, device, False)       dtype and size of the whole
//     (None, {'_local_tensor': torch._utils._rebuild_tensor_v2(storage, 0, (128, 64), (64, 1), ...),
//             '_spec': DTensorSpec {'placements': (Shard {'dim': 0},),
//                                   'mesh': DeviceMesh {'_coordinate_on_dim': (1,),     this rank's
//                                                       'mesh': ranks [2] in 2.6, in 2.15:
//                                                       '_layout': {'axes': ({'shape': (2,), ...},)}, ...}, ...}}))
//
//   torch._tensor._rebuild_from_type_v2(torch._utils._rebuild_wrapper_subclass, ...sharded_tensor.api.ShardedTensor,
//     (ShardedTensor, torch.bfloat16, (257, 64), (64, 1), 0, layout, device, False)
//     ([Shard {'tensor': ..., 'metadata': {'shard_offsets': [129, 0], 'shard_sizes': [128, 64]}}],
//      {'shards_metadata': [of all ranks], ...}, {'local_rank': 1, 'local_world_size': 2, ...}, sharding spec, False))
//
// A ShardedTensor records its boxes. The boxes of a DTensor follow from mesh, coordinate and placements: each dimension
// is cut by its Shards from left to right and then by its _StridedShards from right to left, each as torch.chunk cuts.
// This is how fully_shard cuts a tensor-parallel parameter. torch's own formula for such placements
// (torch/distributed/tensor/_utils.py) gives other boxes if the rows do not divide evenly; the files contain what
// fully_shard made.
// Written by: torch/_tensor.py, torch/distributed/tensor/_api.py, _dtensor_spec.py, placement_types.py,
// torch/distributed/device_mesh.py, torch/distributed/_shard/sharded_tensor/api.py.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "formats/encoding/stored_tensor.h"
#include "formats/encoding/torch_file.h"
#include "lib/layout/layout.h"

namespace reshard {

// The device mesh of a DTensor, as seen by the rank that saved it.
struct RankMesh {
  std::vector<Index> sizes;
  std::optional<std::vector<Index>> coordinate;  // nothing if the rank is not in the mesh
  std::vector<std::string> names;                // of the axes; empty if unnamed
  Index ranks = 1;                               // a lower bound of the number of ranks in the job
  std::optional<Index> rank;
};

// How one axis of the mesh shards or replicates a DTensor.
struct AxisPlacement {
  enum class Kind { kReplicate, kShard, kStridedShard } kind = Kind::kReplicate;
  int dim = 0;
  Index split_factor = 1;
};

// Returns the cuts of a tensor with `rank` dimensions in the order in which they were made. `sizes` are those of the
// mesh; its axes are named by their numbers, as in mesh_of_sizes(). Fails with kUnsupported for a split_factor that
// does not cut into contiguous pieces.
Result<Placement> placement_of(const std::vector<AxisPlacement>& placements, const std::vector<Index>& sizes, int rank);
Mesh mesh_of_sizes(const std::vector<Index>& sizes);

// One rank's part of a tensor.
struct DistributedTensor {
  DType dtype = DType::kFloat32;
  Dims shape;  // of the whole
  std::vector<StoredTensor>
      parts;  // what this rank holds, with boxes in the whole. No part is empty unless the whole is
  std::shared_ptr<const RankMesh> mesh;   // for a DTensor; null for a ShardedTensor
  std::vector<AxisPlacement> placements;  // for a DTensor, one for each axis
  Index ranks = 1;                        // a lower bound of the number of ranks in the job
  std::optional<Index> rank;              // the rank that saved it, if recorded
  // If exactly one axis cuts the tensor: the number of shards, and which of them this is. Otherwise `shards` is 0.
  Index shards = 0;
  Index shard = 0;

  bool is_whole() const { return parts.size() == 1 && parts.front().box == whole(shape); }
  std::string layout() const;  // for people: "Shard(0) on fsdp=4"
};

// Returns whether a value would be a DTensor or ShardedTensor after Python has run the pickle.
bool makes_distributed_tensor(pickle::Value value);

// The distributed tensors of one file. Tensors share meshes, so each mesh is read once.
class DistributedTensors {
 public:
  // `file` must outlive this object.
  explicit DistributedTensors(const TorchFile& file) : file_(file) {}

  // Returns the part that `value`, a value of this file, would be. Fails with kCorrupt if its local tensor is not the
  // one that mesh and placements give to the rank or exceeds the whole, and with kUnsupported for Partial and other
  // placements that do not cut.
  Result<DistributedTensor> resolve(pickle::Value value);

 private:
  Result<std::shared_ptr<const RankMesh>> mesh_of(pickle::Value mesh);
  Status resolve_dtensor(pickle::Value state, DistributedTensor& out);

  const TorchFile& file_;
  std::unordered_map<std::uint32_t, std::shared_ptr<const RankMesh>> meshes_;  // by identity
};

}  // namespace reshard
