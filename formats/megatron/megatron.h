// SPDX-License-Identifier: Apache-2.0
// Checkpoints of Megatron-LM (megatron/training/checkpointing.py), of Megatron core and of the older models.
//
//   latest_checkpointed_iteration.txt       "10"
//
//   iter_0000010/                           --ckpt-format torch: a file for each rank (legacy_reader.cc)
//     mp_rank_01_003_000/                   tp rank[, pipeline stage][, ep rank]; not every (tp, ep) pair has one
//       model_optim_rng.pt                  torch.save: args, iteration, model or model0, model1 ..., optimizer
//       distrib_optim.pt                    flat buffers of a distributed optimizer
//
//   iter_0000010/                           --ckpt-format torch_dist (dist_reader.cc)
//     metadata.json                         {"sharded_backend": "torch_dist", ...}
//     common.pt                             torch.save: args, iteration, ...; newer: the item common_state/shard_0_1
//     .metadata, __R_N.distcp               PyTorch DCP (formats/dcp)
//
// Both give the same tensors: parameters under their names in the model, with global numbers for layers and experts
// ("decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight"), and the optimizer's state as
// "optimizer.state.<parameter>.exp_avg", ".exp_avg_sq" and ".fp32_param", the float32 master. A gated linear_fc1 has
// all gate rows, then all up rows. A config.json is made from args.
#pragma once

#include <memory>
#include <string>

#include "formats/megatron/names.h"
#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kMegatronLegacyFormat;       // per-rank files; written for Transformer Engine's modules
extern const Format kMegatronLegacyLocalFormat;  // for writing for Megatron core's own modules; read by the one above
extern const Format kMegatronFormat;             // torch_dist, and any other directory of a Megatron run

namespace megatron {

inline constexpr std::string_view kLatestFile = "latest_checkpointed_iteration.txt";
inline constexpr std::string_view kRelease = "release";  // instead of an iteration: weights without a training state
inline constexpr std::string_view kMetadataFile = "metadata.json";
inline constexpr std::string_view kCommonFile = "common.pt";
inline constexpr std::string_view kModelFile = "model_optim_rng.pt";
inline constexpr std::string_view kOptimizerFile = "distrib_optim.pt";

// The alignment of parameters in the optimizer's buffers, in elements
// (megatron/core/distributed/param_and_grad_buffer.py).
inline constexpr Index kBufferAlignment = 64;

std::string iteration_directory(const std::string& number);  // "iter_0000010" of "10"

bool is_rank_directory(std::string_view name);              // "mp_rank_00_001"
bool has_rank_files(const PathSnapshot& place);             // whether it holds rank directories
Result<bool> has_sharded_files(const PathSnapshot& place);  // whether it is one of torch_dist

// Returns the name of the iteration that latest_checkpointed_iteration.txt names if that has no tensors, but the
// directory has a Hugging Face model or adapter. Megatron-SWIFT saves so without the optimizer. Otherwise returns an
// empty text.
Result<std::string> iteration_without_tensors(const PathSnapshot& place);

// Open the directory of an iteration.
Result<std::unique_ptr<Reader>> open_rank_files(const PathSnapshot& directory, const OpenOptions& options);
Result<std::unique_ptr<Reader>> open_sharded(const PathSnapshot& directory, const OpenOptions& options);
// Lays out torch_dist for a model under Megatron's names (lib/model/family.h, Convention::kMegatron).
Result<std::unique_ptr<Target>> lay_out_sharded(LayoutRequest request);
// Lays out per-rank files, one for each rank of tp, pp and ep of the mesh. Experts have the same tp as other
// parameters.
Result<std::unique_ptr<Target>> lay_out_rank_files(LayoutRequest request, const Modules& modules);

}  // namespace megatron
}  // namespace reshard
