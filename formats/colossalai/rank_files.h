// The directories that colossalai.utils.checkpoint_io wrote (releases 0.2.0 to 0.3.1): every rank saved what it had,
// parts that ZeRO and tensor parallelism had cut, and how they join stands beside them.
//
//   global_meta.bin            {"meta": ["meta-rank0.bin", ...]}
//   meta-rank0.bin             {"dist_meta": {name: ParamDistMeta} or None, "model": [files], "optimizer": [files],
//                               "param_to_os": {name: id}, "paired_os": {id: {state: whether it is cut like it}}, ...}
//   model-rank0-shard0.bin     {name: tensor}
//   optim-rank0-shard0.bin     {"state": {id: {...}}, "param_groups": [...]}
//
// A tensor of rank r is the tp_rank-th of its tensor-parallel parts. With ZeRO it is a flat run of that part's
// elements, the dp_rank-th of runs that together have zero_numel elements and zero_orig_shape. Tensor-parallel parts
// are joined along tp_shard_dims, of which the highest counts fastest, tp_num_parts along each.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard::colossalai {

bool is_rank_directory(const PathSnapshot& place);
Result<std::unique_ptr<Reader>> open_rank_directory(const PathSnapshot& place, const OpenOptions& options);

}  // namespace reshard::colossalai
