// ColossalAI's checkpoints, as its Booster writes them: a directory of whole tensors, or a tree of such directories.
//
//   epoch-0_step-7/                       what the training applications write
//     modeling/                           the model: shards, their index, config.json
//     optimizer/                          shards by parameter id, their index, pytorch_optim_group.bin
//     lr_scheduler                        one torch.save file
//     running_states.json                 {"epoch": 0, "step": 7, ...}
//
// The names of the shards are in names.h, the index is that of formats/encoding/weight_index.h. Runs with pipeline
// stages write one index a stage into tmp_index_files/ and join them at the end: where that directory is left, the save
// was interrupted. Releases before 0.3.2 also left files of ranks (rank_files.h).
//
// Optimizer states are stored under integer ids; parameter_ids.h finds the parameters. They appear under torchtitan's
// names (optimizer.state.<parameter>.exp_avg), the scheduler's values as lr_scheduler.*, those of running_states.json
// as train_state.*. Described in docs/formats/colossalai.md.
#pragma once

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kColossalaiFormat;

namespace colossalai {

bool recognises(const std::string& path);
Result<std::unique_ptr<Reader>> open(const std::string& path, const OpenOptions& options);

}  // namespace colossalai
}  // namespace reshard
