// SPDX-License-Identifier: Apache-2.0
// Checkpoints of torch_checkpointing 0.1, which torchtitan has used since 2026
// (torch_checkpointing/checkpoint_writer.py, checkpoint_layout.py):
//
//   step-2/metadata.pkl            the placement of every tensor on a mesh (metadata.h)
//   step-2/model_0.pt              rank 0's part of the item "model": torch.save with DTensors; or
//   step-2/model_0.safetensors     its local tensors, under the names of the whole ones
//   step-2/optimizer_0.pt          {"state.<parameter>.exp_avg": ..., "param_groups.<parameter>.lr": ...}
//   step-2/train_state_0.pt ...    items without an entry in metadata.pkl: each rank's own values
//   tmp_step-2/                    an unfinished save; it is renamed when every rank has written
//
// Tensors of the item "model" keep their names, those of other items are named ITEM.NAME. torchtitan's exports for
// Hugging Face (step-2/model.safetensors.index.json next to sharded/) are read as Hugging Face checkpoints.
#pragma once

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kTorchCheckpointingFormat;

namespace torch_checkpointing {

inline constexpr std::string_view kModelItem = "model";

// The parsed name "optimizer_3.pt".
struct RankFile {
  std::string item, extension;  // ".pt"
  Index rank = 0;
};
std::optional<RankFile> parse_rank_file(std::string_view name);

// Opens a step, or its metadata.pkl. Fails with kCorrupt, and says so, if the save did not finish.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// Lays out a safetensors file for each item and rank, and metadata.pkl, for torch_checkpointing's own load. Fails with
// kUnsupported for tensors that are cut in sections, or three times along one dimension.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);

}  // namespace torch_checkpointing
}  // namespace reshard
