// Checkpoints of torch_checkpointing 0.1, which torchtitan saves with since 2026
// (torch_checkpointing/checkpoint_writer.py, checkpoint_layout.py):
//
//   step-2/metadata.pkl            which tensor lies how on which mesh (metadata.h)
//   step-2/model_0.pt              what rank 0 has of the item "model": torch.save, DTensors inside; or
//   step-2/model_0.safetensors     its local tensors, under the names of the whole
//   step-2/optimizer_0.pt          {"state.<parameter>.exp_avg": ..., "param_groups.<parameter>.lr": ...}
//   step-2/train_state_0.pt ...    items without an entry in metadata.pkl: each rank's own values
//   tmp_step-2/                    a save that has not finished: renamed when every rank has written
//
// Tensors of the item "model" keep their names, those of others are ITEM.NAME. What torchtitan exports as Hugging
// Face's (step-2/model.safetensors.index.json beside sharded/) is read as that.
#pragma once

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kTorchCheckpointingFormat;

namespace torch_checkpointing {

inline constexpr std::string_view kModelItem = "model";

// "optimizer_3.pt" taken apart.
struct RankFile {
  std::string item, extension;  // ".pt"
  Index rank = 0;
};
std::optional<RankFile> parse_rank_file(std::string_view name);

// Of a step or its metadata.pkl. What did not finish is corrupt, and said to be that.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// One safetensors file an item and rank, and metadata.pkl: what torch_checkpointing's own load takes. Unsupported for
// tensors that are cut in sections, or three times along one dimension.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);

}  // namespace torch_checkpointing
}  // namespace reshard
