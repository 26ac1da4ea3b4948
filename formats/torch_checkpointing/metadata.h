// SPDX-License-Identifier: Apache-2.0
// metadata.pkl of torch_checkpointing (torch_checkpointing/distributed_metadata.py, dtensor_metadata.py): the tensors
// of a step, their placement on device meshes, and the names of the files. It is a pickle of plain values without
// classes.
//
//   {"metadata": {ITEM: {"nested_path_to_metadata":
//                          {'["layers.0.attention.wq.weight"]':              JSON of the path in the item
//                             [{"sharding_metadata": {"type": "DTensorShardingMetadata", "data": {
//                                 "global_shape": [64, 96], "dtype": "torch.bfloat16", "stride": [96, 1],
//                                 "mesh_spec": {"device_type": "cpu", "mesh_shape": (2, 2), "mesh_data": (0, 1, 2, 3),
//                                               "mesh_dim_names": ("dp_shard", "tp") | None},
//                                 "placements": [{"type": "Shard", "dim": 0} | {"type": "StridedShard", "dim": 0,
//                                                "split_factor": 2} | {"type": "Replicate"}, ...]}},
//                               "ranks": (0, 1, 2, 3)}, ...]},               an entry for each mesh that holds it
//                        "rank_to_layout_info": {0: None | {"file_path": "model_0.safetensors",
//                                                           "serialization_format": {"type": ...}}, ...}}},
//    "world_size": 4, "version": "2.0"}
//
// Without a version, or in version "1.0", the tensors of all items are in one dict under '["model","layers.0..."]', and
// the files under "rank_to_layout_info_mappings": {0: {ITEM: None | {"file_path": ...}}, ...}.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "formats/encoding/distributed_tensor.h"
#include "lib/base/result.h"

namespace reshard::torch_checkpointing {

inline constexpr std::string_view kMetadataFile = "metadata.pkl";
inline constexpr std::string_view kVersion = "2.0";  // the version that we write
inline constexpr std::string_view kFlatVersion = "1.0";

// A mesh of ranks.
struct DeviceMesh {
  std::vector<Index> sizes;
  std::vector<Index> ranks;        // in the order of the mesh; the last axis counts fastest
  std::vector<std::string> names;  // of the axes; may be empty
};

// The placement of a tensor on one mesh.
struct StoredPlacement {
  DType dtype = DType::kFloat32;
  Dims shape;  // of the whole
  std::shared_ptr<const DeviceMesh> mesh;
  std::vector<AxisPlacement> placements;  // one for each axis

  bool is_replicated() const;
};

// A tensor of an item.
struct ItemTensor {
  KeyPath path;
  std::string name;                       // the path joined by dots
  std::vector<StoredPlacement> holdings;  // at least one; all have the same shape and dtype
};

// A part of the state with files of its own: the model, the optimizer, ...
struct Item {
  std::vector<ItemTensor> tensors;  // sorted by name
  std::vector<std::string> files;   // for each rank, relative to the step
};

// The content of metadata.pkl.
struct Metadata {
  Index world_size = 0;
  std::map<std::string, Item> items;
};

// Parses metadata.pkl. Fails with kUnsupported for another version and for tensors that are not described as DTensors,
// and with kCorrupt for contradictions. `path` is for messages.
Result<Metadata> parse_metadata(std::string bytes, const std::string& path);

// Returns the name of a rank's file if the metadata give none. It is a torch.save file.
std::string default_file(std::string_view item, Index rank);

// Returns the name of a rank's safetensors file, which the metadata must give.
std::string safetensors_file(std::string_view item, Index rank);

// Returns the pickle of metadata whose files are safetensors. Equal meshes are written once and shared.
std::string write_metadata(const Metadata& metadata);

}  // namespace reshard::torch_checkpointing
