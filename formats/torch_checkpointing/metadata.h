// metadata.pkl of torch_checkpointing (torch_checkpointing/distributed_metadata.py, dtensor_metadata.py): which tensors
// a step has, how each lies on a device mesh, and what its files are called. A pickle of plain values, no classes.
//
//   {"metadata": {ITEM: {"nested_path_to_metadata":
//                          {'["layers.0.attention.wq.weight"]':              JSON of the path in the item
//                             [{"sharding_metadata": {"type": "DTensorShardingMetadata", "data": {
//                                 "global_shape": [64, 96], "dtype": "torch.bfloat16", "stride": [96, 1],
//                                 "mesh_spec": {"device_type": "cpu", "mesh_shape": (2, 2), "mesh_data": (0, 1, 2, 3),
//                                               "mesh_dim_names": ("dp_shard", "tp") | None},
//                                 "placements": [{"type": "Shard", "dim": 0} | {"type": "StridedShard", "dim": 0,
//                                                "split_factor": 2} | {"type": "Replicate"}, ...]}},
//                               "ranks": (0, 1, 2, 3)}, ...]},               one entry for each mesh that holds it
//                        "rank_to_layout_info": {0: None | {"file_path": "model_0.safetensors",
//                                                           "serialization_format": {"type": ...}}, ...}}},
//    "world_size": 4, "version": "2.0"}
//
// Version "1.0", or none: the tensors of all items side by side under '["model","layers.0..."]', and the files under
// "rank_to_layout_info_mappings": {0: {ITEM: None | {"file_path": ...}}, ...}.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "formats/encoding/distributed_tensor.h"
#include "lib/base/result.h"

namespace reshard::torch_checkpointing {

inline constexpr std::string_view kMetadataFile = "metadata.pkl";
inline constexpr std::string_view kVersion = "2.0";  // what is written
inline constexpr std::string_view kFlatVersion = "1.0";

struct DeviceMesh {
  std::vector<Index> sizes;
  std::vector<Index> ranks;        // in the order of the mesh, the last axis the fastest
  std::vector<std::string> names;  // of the axes; may be empty
};

// How the ranks of one mesh hold a tensor.
struct Holding {
  DType dtype = DType::kFloat32;
  Dims shape;  // of the whole
  std::shared_ptr<const DeviceMesh> mesh;
  std::vector<AxisPlacement> placements;  // one for each axis

  bool is_replicated() const;
};

struct ItemTensor {
  KeyPath path;
  std::string name;               // the path joined by dots
  std::vector<Holding> holdings;  // one at least; all of one shape and dtype
};

struct Item {
  std::vector<ItemTensor> tensors;  // by name
  std::vector<std::string> files;   // of each rank, relative to the step
};

struct Metadata {
  Index world_size = 0;
  std::map<std::string, Item> items;
};

// Unsupported for another version, and for tensors described otherwise than as DTensors; corrupt for anything that does
// not fit together. `path` is for messages.
Result<Metadata> parse_metadata(std::string bytes, const std::string& path);

// The file of a rank where nothing else is said.
std::string default_file(std::string_view item, Index rank);

// Where nothing else is said, a rank's file is torch.save; safetensors are said to be that.
std::string safetensors_file(std::string_view item, Index rank);

// The pickle of metadata whose files are safetensors. Descriptions of meshes are shared.
std::string write_metadata(const Metadata& metadata);

}  // namespace reshard::torch_checkpointing
