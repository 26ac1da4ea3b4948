// SPDX-License-Identifier: Apache-2.0
// Infers which mesh wrote a checkpoint, from its boxes alone.
//
// DCP records no mesh. But torch cuts by one rule (torch.chunk), numbers its ranks by one rule (row-major over pp,
// dp_replicate, dp_shard, cp, tp), names a file after the rank that wrote it (CatalogFile::writer), and shards in one
// way for each kind of parallelism. So every possible mesh is tried, and those are kept for which each box is one that
// its writer owned:
//
//   FSDP             dim 0 in dp_shard x cp pieces, norms too
//   row-parallel     dim 1 in tp pieces, dim 0 by FSDP           (wo, w2)
//   column-parallel  dim 0 in tp pieces, each in FSDP's pieces   (wq, w1, ...; torch's _StridedShard)
//   pipeline         blocks of ranks that write disjoint layers
//   replicas         of several ranks with the same box, they take turns to write or the lowest one writes
//
// Facts that leave no trace are reported as unknown.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/checkpoint/catalog.h"
#include "lib/layout/layout.h"

namespace reshard {

enum class Confidence { kUnknown, kLikely, kCertain };
std::string_view confidence_name(Confidence confidence);  // "certain"

struct InferredAxis {
  std::string name;  // pp, dp_replicate, dp_shard, cp, tp
  Index size = 1;    // 0 if unknown
  Confidence confidence = Confidence::kUnknown;
  std::string evidence;  // a clause: "wo, w2 cut in 8 on dim 1; wq, wk in 8 on dim 0; norm whole"
};

// The placement of each tensor of a catalog on a mesh.
struct TensorPlacements {
  std::vector<Placement> placements;    // distinct ones
  std::vector<std::int32_t> of_tensor;  // index of a tensor's placement; -1: the mesh does not explain its boxes

  const Placement* find(std::size_t tensor) const {  // null likewise
    return of_tensor[tensor] < 0 ? nullptr : &placements[of_tensor[tensor]];
  }
};

struct InferredMesh {
  Index ranks = 0;                       // that took part in the save; 0: unknown
  std::vector<InferredAxis> axes;        // only those with something to report; others have size 1
  std::vector<Mesh> hypotheses;          // all equally good meshes; the first one matches `axes`
  std::vector<TensorPlacements> placed;  // placements for each hypothesis
  std::vector<std::string> notes;        // whole sentences
  std::vector<std::string> placements;   // of each tensor: "whole", "shard(0) x 8", "irregular (5 boxes)"

  const InferredAxis* find(std::string_view axis) const;
};

// `dataloader_ranks` is the value of the object dataloader.world_size, if there is one: dp_replicate x dp_shard, the
// only trace of context parallelism. Takes some nanoseconds per box.
InferredMesh infer_mesh(const Catalog& catalog, std::optional<Index> dataloader_ranks = std::nullopt);

}  // namespace reshard
