// One rank's part of a tensor that many ranks hold together, as torch.save pickles it: a DTensor (FSDP2, tensor
// parallelism, FSDP1 over a device mesh) or a ShardedTensor (FSDP1 without one).
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
// A ShardedTensor writes its boxes down. A DTensor's follow from mesh, coordinate and placements: each dimension is cut
// by its Shards from left to right and then by its _StridedShards from right to left, each with torch.chunk. That is
// how fully_shard cuts a tensor-parallel parameter. torch's own formula for such placements (torch/distributed/tensor/
// _utils.py) differs from it where the rows do not divide, and the files hold what fully_shard made.
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

// The device mesh of a DTensor, as the rank that saved it sees it.
struct RankMesh {
  std::vector<Index> sizes;
  std::optional<std::vector<Index>> coordinate;  // nothing: the rank is not in the mesh
  std::vector<std::string> names;                // of the axes; empty: none given
  Index ranks = 1;                               // of the job, at least
  std::optional<Index> rank;
};

// How one axis of the mesh holds a DTensor.
struct AxisPlacement {
  enum class Kind { kReplicate, kShard, kStridedShard } kind = Kind::kReplicate;
  int dim = 0;
  Index split_factor = 1;
};

// The cuts of a tensor of so many dimensions, in the order in which they were made, on a mesh of these sizes, whose
// axes are called by their numbers as mesh_of_sizes() has them. Unsupported for a split_factor that is no cut of
// contiguous pieces.
Result<Placement> placement_of(const std::vector<AxisPlacement>& placements, const std::vector<Index>& sizes, int rank);
Mesh mesh_of_sizes(const std::vector<Index>& sizes);

struct DistributedTensor {
  DType dtype = DType::kFloat32;
  Dims shape;  // of the whole
  std::vector<StoredTensor>
      parts;  // what this rank holds; their boxes are in the whole. None is empty, unless it is all
  std::shared_ptr<const RankMesh> mesh;   // of a DTensor; null for a ShardedTensor
  std::vector<AxisPlacement> placements;  // of a DTensor, one for each axis
  Index ranks = 1;                        // of the job, as far as the tensor tells: at least so many
  std::optional<Index> rank;              // that saved it, where the tensor tells
  // Where one axis alone cuts it: into how many shards, and which of them this is. 0: another way.
  Index shards = 0;
  Index shard = 0;

  bool is_whole() const { return parts.size() == 1 && parts.front().box == whole(shape); }
  std::string layout() const;  // for people: "Shard(0) on fsdp=4"
};

// Whether a value would be a DTensor or ShardedTensor once Python has run the pickle.
bool makes_distributed_tensor(pickle::Value value);

// Those of one file, which they refer to. Tensors share meshes, and each is read once.
class DistributedTensors {
 public:
  explicit DistributedTensors(const TorchFile& file) : file_(file) {}

  // The part that `value`, of this file, would be. Corrupt where its local tensor is not what mesh and placements give
  // the rank, or reaches outside the whole; unsupported for Partial and other placements that are no part.
  Result<DistributedTensor> resolve(pickle::Value value);

 private:
  Result<std::shared_ptr<const RankMesh>> mesh_of(pickle::Value mesh);
  Status resolve_dtensor(pickle::Value state, DistributedTensor& out);

  const TorchFile& file_;
  std::unordered_map<std::uint32_t, std::shared_ptr<const RankMesh>> meshes_;  // by identity
};

}  // namespace reshard
