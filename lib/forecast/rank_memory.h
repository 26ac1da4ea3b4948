// SPDX-License-Identifier: Apache-2.0
// Computes what each rank of a mesh holds while a model is trained: parameters, gradients and Adam's state, counted
// from the table of its tensors. Activations, communication buffers and the frameworks' own memory are not included.
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
  Index ep = 1;  // expert parallelism: not a factor, it divides the ranks over which FSDP shards

  Index size(std::string_view axis) const { return axis == "ep" ? ep : mesh.size(axis); }
  // Returns the number of ranks over which FSDP shards after tensor parallelism: dp_shard x cp.
  Index shards() const { return mesh.size("dp_shard") * mesh.size("cp"); }
};

// How experts are sharded: distributed over ep ranks in runs, and each expert sharded over the remaining ranks.
struct ExpertSharding {
  bool is_cut_by_tp = true;  // each expert, by its rule; false: ep also uses the tp ranks
  Index shards = 1;          // FSDP shards of each expert
};
// Returns nothing if ep divides neither dp_shard x cp nor dp_shard x cp x tp.
std::optional<ExpertSharding> expert_sharding(const Degrees& degrees);

// In bytes, except for the first two members.
struct RankMemory {
  Index rank = 0;
  Index parameters = 0;  // elements, without scales of quantized matrices, whose bytes count
  Index weights = 0;
  Index gradients = 0;
  Index optimizer = 0;  // Adam in float32: two moments, and a master copy of weights that are not float32

  Index total() const { return weights + gradients + optimizer; }
};

struct StageMemory {
  Index stage = 0;
  Index first_layer = 0;
  Index layers = 0;                          // number of layers from first_layer on
  bool has_first = false, has_last = false;  // holds the parameters before or after the layers
  RankMemory largest, smallest;              // of its ranks by total(); the first if several are equal
};

struct MemoryOptions {
  std::optional<DType> weights;  // overrides the tensors' dtypes; matrices then have no scales
  DType gradients = DType::kFloat32;
};

// Returns the memory of every stage's ranks. Tensor parallelism cuts by the family's rules and FSDP cuts dimension 0 of
// the rest, both like torch.chunk, so the last ranks may have less; layers are distributed like torchtitan's. A tied
// head counts if it is on another stage than the embedding, because it then needs a copy. Requires a model whose
// elements can be counted, at most layers + 2 stages, and an expert_sharding().
std::vector<StageMemory> stage_memory(const std::vector<Parameter>& parameters, Index layers, const Degrees& degrees,
                                      const MemoryOptions& options);

// Returns the parameter's dtype, or that of the options. An unknown dtype counts as float32, as in transformers.
DType weight_dtype(const Parameter& parameter, const MemoryOptions& options);

// Returns the number of elements that the k-th of `pieces` ranks holds of a dimension of `size`, if each of `sections`
// equal parts is cut separately.
Index local_extent(Index size, Index sections, Index pieces, Index k);

}  // namespace reshard
