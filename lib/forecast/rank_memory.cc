// SPDX-License-Identifier: Apache-2.0
#include "lib/forecast/rank_memory.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "lib/base/text.h"
#include "lib/layout/stages.h"

namespace reshard {
namespace {

// Tensors of one stage that are sharded alike: same rule, shape and dtype.
struct EqualShards {
  const NameRule* rule = nullptr;
  Dims shape;
  DType dtype = DType::kFloat32;
  bool is_scale = false;
  Index count = 0;    // in the stage; for experts, per expert
  Index experts = 1;  // number of experts, before ep distributes them
  Index packed = 1;   // elements of `shape` in one element of the dtype
};

Index stage_of(const Parameter& p, Index layers, Index stages) {
  switch (p.rule->place) {
    case NameRule::Place::kFirst:
      return 0;
    case NameRule::Place::kLast:
      return stages - 1;
    case NameRule::Place::kLayer:
      break;
  }
  return stage_of_layer(StageRule::kTorchtitan, p.layer, layers, stages);
}

// A rank's coordinates within its stage.
struct RankCoordinates {
  Index shard = 0;  // over dp_shard x cp
  Index tp = 0;
};

class Counter {
 public:
  Counter(const Degrees& degrees, const MemoryOptions& options)
      : degrees_(degrees), options_(options), tp_(degrees.mesh.size("tp")), experts_(*expert_sharding(degrees)) {}

  RankMemory count(const std::vector<EqualShards>& tensors, const RankCoordinates& at_rank) const {
    RankMemory memory;
    for (const EqualShards& t : tensors) {
      const Index elements = local_elements(t, at_rank);
      memory.weights += ceil_div(elements * byte_size(t.dtype), t.packed);
      if (t.is_scale) continue;
      memory.parameters += elements;
      memory.gradients += elements * byte_size(options_.gradients);
      const Index copies = t.dtype == DType::kFloat32 ? 2 : 3;
      memory.optimizer += elements * copies * byte_size(DType::kFloat32);
    }
    return memory;
  }

 private:
  Index local_elements(const EqualShards& t, const RankCoordinates& at_rank) const {
    Index copies = t.count, shards = degrees_.shards(), shard = at_rank.shard;
    bool is_cut = t.rule->tp_dim >= 0 && t.rule->tp_dim < t.shape.rank();
    if (t.rule->is_per_expert()) {
      // The ranks of one expert are ep apart.
      const Index at = experts_.is_cut_by_tp ? at_rank.shard : at_rank.shard * tp_ + at_rank.tp;
      copies *= local_extent(t.experts, 1, degrees_.ep, at % degrees_.ep);
      shards = experts_.shards;
      shard = at / degrees_.ep;
      is_cut = is_cut && experts_.is_cut_by_tp;
    }
    Dims local = t.shape;
    if (is_cut) local[t.rule->tp_dim] = local_extent(local[t.rule->tp_dim], t.rule->sections, tp_, at_rank.tp);
    if (local.rank() > 0) local[0] = local_extent(local[0], 1, shards, shard);
    return copies * volume(local);
  }

  const Degrees& degrees_;
  const MemoryOptions& options_;
  Index tp_;
  ExpertSharding experts_;
};

// Returns the tensors of each stage, grouped if alike.
std::vector<std::vector<EqualShards>> by_stage(const std::vector<Parameter>& parameters, Index layers, Index stages,
                                               const MemoryOptions& options) {
  // An expert's number is not part of the key: the experts of a layer are counted, and distributed later.
  using Key = std::tuple<Index, const NameRule*, bool, DType>;
  std::map<Key, EqualShards> groups;
  for (const Parameter& p : parameters) {
    const Index stage = stage_of(p, layers, stages);
    if ((p.is_tied && stage == 0) || (p.is_scale && options.weights)) continue;
    const DType dtype = weight_dtype(p, options);
    EqualShards& alike = groups[{stage, p.rule, p.is_scale, dtype}];
    if (alike.rule == nullptr)
      alike = {p.rule, p.value_shape(), dtype, p.is_scale, 0, 1, dtype == DType::kUint8 && !p.is_scale ? 2 : 1};
    if (p.expert <= 0) ++alike.count;
    alike.experts = std::max(alike.experts, p.expert + 1);
  }
  std::vector<std::vector<EqualShards>> out(stages);
  for (auto& [key, alike] : groups) out[static_cast<std::size_t>(std::get<0>(key))].push_back(alike);
  return out;
}

}  // namespace

std::optional<ExpertSharding> expert_sharding(const Degrees& degrees) {
  const Index shards = degrees.shards(), tp = degrees.mesh.size("tp");
  if (shards % degrees.ep == 0) return ExpertSharding{true, shards / degrees.ep};
  if (shards * tp % degrees.ep == 0) return ExpertSharding{false, shards * tp / degrees.ep};
  return std::nullopt;
}

DType weight_dtype(const Parameter& parameter, const MemoryOptions& options) {
  if (options.weights && !parameter.has_own_dtype) return *options.weights;
  return dtype_from_torch(parameter.dtype).value_or(DType::kFloat32);
}

Index local_extent(Index size, Index sections, Index pieces, Index k) {
  Index sum = 0;
  for (Index s = 0; s < sections; ++s) {
    const Interval section = chunk(size, sections, s);
    const Interval mine = chunk(section.end - section.begin, pieces, k);
    sum += mine.end - mine.begin;
  }
  return sum;
}

std::vector<StageMemory> stage_memory(const std::vector<Parameter>& parameters, Index layers, const Degrees& degrees,
                                      const MemoryOptions& options) {
  const Index stages = degrees.mesh.size("pp"), tp = degrees.mesh.size("tp"), shards = degrees.shards();
  const auto tensors = by_stage(parameters, layers, stages, options);
  const Counter counter(degrees, options);
  std::vector<StageMemory> out(stages);
  for (Index s = 0; s < stages; ++s) {
    StageMemory& stage = out[s];
    stage.stage = s;
    stage.has_first = s == 0;
    stage.has_last = s == stages - 1;
    const Index first_rank = s * degrees.mesh.size("dp_replicate") * shards * tp;
    for (Index at = 0; at < shards * tp; ++at) {
      RankMemory memory = counter.count(tensors[s], {at / tp, at % tp});
      memory.rank = first_rank + at;
      if (at == 0 || memory.total() > stage.largest.total()) stage.largest = memory;
      if (at == 0 || memory.total() < stage.smallest.total()) stage.smallest = memory;
    }
  }
  for (Index layer = layers - 1; layer >= 0; --layer) {
    StageMemory& stage = out[stage_of_layer(StageRule::kTorchtitan, layer, layers, stages)];
    stage.first_layer = layer;
    ++stage.layers;
  }
  return out;
}

}  // namespace reshard
