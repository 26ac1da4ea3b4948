// SPDX-License-Identifier: Apache-2.0
// Directories of training runs: what holds checkpoints without being one file's or one writer's.
//
//   checkpoint-500/                 model and optimizer saved side by side, joined into one
//     pytorch_model_fsdp_M/ optimizer_M/         the M-th of a run, each a Distributed Checkpoint
//     pytorch_model_fsdp.bin optimizer.bin       or whole, in files of rank 0; _M behind the word where M is not 0
//                                                (accelerate/utils/fsdp_utils.py)
//     model.safetensors model_M.safetensors      several models without FSDP; or pytorch_model.bin and its like
//                                                (accelerate/checkpointing.py)
//   step1000/model_and_optim/       one Distributed Checkpoint, what else was saved at that step beside it
//                                                (olmo_core/train/checkpoint.py)
//   outputs/{step-100, step-200}/                         a run of several steps: the newest complete one is named
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/registry.h"

namespace reshard {

// Opens the checkpoint that a directory's parts form together; nothing if it has none. If there are several models,
// each is a part, with its names under "model_M.".
Result<std::optional<OpenCheckpoint>> open_parts(const PathSnapshot& place, const OpenOptions& options);

// The place in a step's directory that is its checkpoint; null: there is none.
Result<const PathSnapshot*> checkpoint_of_step(const PathSnapshot& place);

// Adds to an open model the optimizer state next to it that is read without it: without FSDP, Accelerate
// (optimizer.bin) and Trainer (optimizer.pt) save torch's own, which numbers the parameters (numbered_optimizer.h).
// Notes why if that cannot be. Of such a file, opened by itself or next to its model, warns if its moments have shapes
// that no parameter of the model has. A file that cannot be read says nothing of that.
Status join_optimizers(const PathSnapshot& place, OpenCheckpoint& open);

// The checkpoints below a run's directory, one or two levels down, in the order of their steps. Opens none; what it may
// not look into is passed over.
Result<std::vector<std::string>> checkpoints_of_run(const std::string& path);
}  // namespace reshard
