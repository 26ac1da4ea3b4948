// Which mesh wrote a checkpoint, told from its boxes alone.
//
// DCP records no mesh. But torch cuts by one rule (torch.chunk), numbers its ranks by one rule (row-major over pp,
// dp_replicate, dp_shard, cp, tp), names a file after the rank that wrote it (CatalogFile::writer), and shards for each
// kind of parallelism in one way. So every mesh that could have been is tried, and those are kept under which each box
// is a box that its writer owned:
//
//   FSDP             dim 0 in dp_shard x cp pieces, norms too
//   row-parallel     dim 1 in tp pieces, dim 0 by FSDP           (wo, w2)
//   column-parallel  dim 0 in tp pieces, each in FSDP's pieces   (wq, w1, ...; torch's _StridedShard)
//   pipeline         blocks of ranks that write disjoint layers
//   replicas         one box of several ranks' is written, by turns or by the lowest rank
//
// What leaves no trace is said to be unknown.
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
  Index size = 1;    // 0 when unknown
  Confidence confidence = Confidence::kUnknown;
  std::string evidence;  // a clause: "wo, w2 cut in 8 on dim 1; wq, wk in 8 on dim 0; norm whole"
};

// How each tensor of a catalog lies on a mesh.
struct TensorPlacements {
  std::vector<Placement> placements;    // distinct ones
  std::vector<std::int32_t> of_tensor;  // which of them a tensor has; -1: the mesh does not explain its boxes

  const Placement* find(std::size_t tensor) const {  // null likewise
    return of_tensor[tensor] < 0 ? nullptr : &placements[static_cast<std::size_t>(of_tensor[tensor])];
  }
};

struct InferredMesh {
  Index ranks = 0;                       // that took part in the save; 0: the files do not tell
  std::vector<InferredAxis> axes;        // those there is something to say about; others have size 1
  std::vector<Mesh> hypotheses;          // every mesh that fits as well as the first, which is what the axes say
  std::vector<TensorPlacements> placed;  // the tensors on each of the hypotheses
  std::vector<std::string> notes;        // whole sentences
  std::vector<std::string> placements;  // of each tensor of the catalog: "whole", "shard(0) x 8", "irregular (5 boxes)"

  const InferredAxis* find(std::string_view axis) const;
};

// `dataloader_ranks` is the value of the object dataloader.world_size where there is one: dp_replicate x dp_shard, the
// only trace that context parallelism leaves. Takes some nanoseconds a box.
InferredMesh infer_mesh(const Catalog& catalog, std::optional<Index> dataloader_ranks = std::nullopt);

}  // namespace reshard
