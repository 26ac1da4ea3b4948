// What each rank of a mesh holds of a model while it trains: parameters, gradients and Adam's state, counted from the
// table of its tensors. Activations, buffers of communication and what frameworks take for themselves are left out.
#pragma once

#include <optional>
#include <vector>

#include "lib/layout/layout.h"
#include "lib/model/family.h"
#include "lib/model/parameters.h"

namespace reshard {

// The degrees of parallelism of a run.
struct Degrees {
  Mesh mesh;     // pp, dp_replicate, dp_shard, cp, tp; their product is the number of ranks
  Index ep = 1;  // expert parallelism: no factor of its own, it shares out the ranks that FSDP shards over

  Index size(std::string_view axis) const { return axis == "ep" ? ep : mesh.size(axis); }
  // Over how many ranks FSDP shards what is left after tensor parallelism: dp_shard x cp.
  Index shards() const { return mesh.size("dp_shard") * mesh.size("cp"); }
};

// How experts lie on a mesh: dealt out over ep ranks in runs, each expert then sharded over those that are left.
struct ExpertSharding {
  bool is_cut_by_tp = true;  // each expert, as its rule says; false: ep uses the ranks of tp, too
  Index shards = 1;          // FSDP's, of each expert
};
// Nothing where ep divides neither dp_shard x cp nor dp_shard x cp x tp.
std::optional<ExpertSharding> expert_sharding(const Degrees& degrees);

// Bytes, but for the first two.
struct RankMemory {
  Index rank = 0;
  Index parameters = 0;  // elements; scales of quantized matrices are not counted, their bytes are
  Index weights = 0;
  Index gradients = 0;
  Index optimizer = 0;  // Adam in float32: two moments, and a master copy of what is not float32 itself

  Index total() const { return weights + gradients + optimizer; }
};

struct StageMemory {
  Index stage = 0;
  Index first_layer = 0;
  Index layers = 0;                          // how many, from first_layer on
  bool has_first = false, has_last = false;  // what is before the layers, and after them
  RankMemory largest, smallest;              // of its ranks by total; the first of them where several are equal
};

struct MemoryOptions {
  std::optional<DType> weights;  // instead of the tensors' own; matrices then have no scales
  DType gradients = DType::kFloat32;
};

// Every stage's ranks, when tensor parallelism cuts as the family's rules say, FSDP cuts dimension 0 of what is left
// (both as torch.chunk does, so that the last ranks may have less), and layers are dealt out as torchtitan does it. A
// tied head is counted where it is on another stage than the embedding, which needs a copy then. The model
// must be countable, and there must be no more stages than layers + 2, and an expert_sharding.
std::vector<StageMemory> stage_memory(const std::vector<Parameter>& parameters, Index layers, const Degrees& degrees,
                                      const MemoryOptions& options);

// Of its own, or the options'. What has no known dtype is float32, as transformers takes it.
DType weight_dtype(const Parameter& parameter, const MemoryOptions& options);

// Elements along a dimension of `size` that the k-th of `pieces` ranks holds, when each of `sections` equal parts is
// cut by itself.
Index local_extent(Index size, Index sections, Index pieces, Index k);

}  // namespace reshard
