// SPDX-License-Identifier: Apache-2.0
// The directories that colossalai.utils.checkpoint_io wrote (releases 0.2.0 to 0.3.1). Every rank saved its parts as
// ZeRO and tensor parallelism had cut them, and meta files say how they join.
//
//   global_meta.bin            {"meta": ["meta-rank0.bin", ...]}
//   meta-rank0.bin             {"dist_meta": {name: ParamDistMeta} or None, "model": [files], "optimizer": [files],
//                               "param_to_os": {name: id}, "paired_os": {id: {state: whether it is cut like it}}, ...}
//   model-rank0-shard0.bin     {name: tensor}
//   optim-rank0-shard0.bin     {"state": {id: {...}}, "param_groups": [...]}
//
// A rank's tensor is tensor-parallel part number tp_rank. With ZeRO it is a flat run of that part: number dp_rank of
// runs that together have zero_numel elements and zero_orig_shape. Tensor-parallel parts are joined along
// tp_shard_dims, with tp_num_parts along each; the highest dimension counts fastest.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard::colossalai {

bool is_rank_directory(const PathSnapshot& place);
Result<std::unique_ptr<Reader>> open_rank_directory(const PathSnapshot& place, const OpenOptions& options);

}  // namespace reshard::colossalai
