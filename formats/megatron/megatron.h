// Megatron-LM's checkpoints (megatron/training/checkpointing.py), of Megatron core and of the models before it.
//
//   latest_checkpointed_iteration.txt       "10"
//
//   iter_0000010/                           --ckpt-format torch: a file of each rank (legacy_reader.cc)
//     mp_rank_01_003_000/                   tp rank[, stage of the pipeline][, ep rank]; not every (tp, ep) has one
//       model_optim_rng.pt                  torch.save: args, iteration, model or model0, model1 ..., optimizer
//       distrib_optim.pt                    of a distributed optimizer: flat buffers
//
//   iter_0000010/                           --ckpt-format torch_dist (dist_reader.cc)
//     metadata.json                         {"sharded_backend": "torch_dist", ...}
//     common.pt                             torch.save: args, iteration, ...; newer: the item common_state/shard_0_1
//     .metadata, __R_N.distcp               PyTorch DCP (formats/dcp)
//
// Both are shown alike: parameters under the names that they have in the model, layers and experts numbered through
// ("decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight"), and the optimizer's state as
// "optimizer.state.<parameter>.exp_avg", ".exp_avg_sq" and ".fp32_param", the float32 master. A gated linear_fc1 is all
// gate rows, then all up rows. A config.json is made of args.
#pragma once

#include <memory>
#include <string>

#include "formats/megatron/names.h"
#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kMegatronLegacyFormat;       // files of ranks; written for Transformer Engine's modules
extern const Format kMegatronLegacyLocalFormat;  // written for Megatron core's own, and read as the other
extern const Format kMegatronFormat;             // torch_dist, and whatever else a run of Megatron left

namespace megatron {

inline constexpr std::string_view kLatestFile = "latest_checkpointed_iteration.txt";
inline constexpr std::string_view kRelease = "release";  // in the place of an iteration: weights alone
inline constexpr std::string_view kMetadataFile = "metadata.json";
inline constexpr std::string_view kCommonFile = "common.pt";
inline constexpr std::string_view kModelFile = "model_optim_rng.pt";
inline constexpr std::string_view kOptimizerFile = "distrib_optim.pt";

// Elements to which a parameter begins in the optimizer's buffers (megatron/core/distributed/param_and_grad_buffer.py).
inline constexpr Index kBufferAlignment = 64;

std::string iteration_directory(const std::string& number);  // "iter_0000010" of "10"

bool is_rank_directory(std::string_view name);              // "mp_rank_00_001"
bool has_rank_files(const PathSnapshot& place);             // whether it holds rank directories
Result<bool> has_sharded_files(const PathSnapshot& place);  // whether it is one of torch_dist

// `directory` is an iteration's.
Result<std::unique_ptr<Reader>> open_rank_files(const PathSnapshot& directory, const OpenOptions& options);
Result<std::unique_ptr<Reader>> open_sharded(const PathSnapshot& directory, const OpenOptions& options);
// torch_dist, of a model under its names (lib/model/family.h, Convention::kMegatron).
Result<std::unique_ptr<Target>> lay_out_sharded(LayoutRequest request);
// Likewise files of ranks: each rank of tp, pp and ep of the mesh has one, and the experts' tp is the others'.
Result<std::unique_ptr<Target>> lay_out_rank_files(LayoutRequest request, const Modules& modules);

}  // namespace megatron
}  // namespace reshard
