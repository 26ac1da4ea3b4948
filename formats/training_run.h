// SPDX-License-Identifier: Apache-2.0
// Directories of training runs: those whose checkpoint consists of several, and those that contain several steps.
//
//   checkpoint-500/                 model and optimizer saved side by side, joined into one
//     pytorch_model_fsdp_M/ optimizer_M/         the M-th of a run, each a Distributed Checkpoint
//     pytorch_model_fsdp.bin optimizer.bin       or whole, in files of rank 0; _M follows the word unless M is 0
//                                                (accelerate/utils/fsdp_utils.py)
//     model.safetensors model_M.safetensors      several models without FSDP; or pytorch_model.bin and its like
//                                                (accelerate/checkpointing.py)
//   epoch_0_step_99/{model,optim}/  NeMo AutoModel's: files of Hugging Face or a Distributed Checkpoint, and another of
//                                   these (nemo_automodel/components/checkpoint/checkpointing.py)
//   checkpoint-500/{model,optimizer}/   LLaMA-Factory's: two Distributed Checkpoints, of get_model_state_dict() and
//                                   get_optimizer_state_dict() (llamafactory/v1/plugins/trainer_plugins/distributed)
//   step1000/model_and_optim/       one Distributed Checkpoint, next to the other files of that step
//                                                (olmo_core/train/checkpoint.py)
//   outputs/{step-100, step-200}/   a run of several steps: an error names the newest complete one
//   lightning_logs/version_0/checkpoints/epoch=1-step=200.ckpt     a step as a file, or with FSDP as a directory
//   lightning_logs/version_0/checkpoints/last.ckpt                 the newest, overwritten by each save
//                                                (lightning/pytorch/callbacks/model_checkpoint.py)
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/registry.h"

namespace reshard {

// Opens a directory's parts as one checkpoint. Returns nothing if it has no parts. If it has several models, each is a
// part with its names under "model_M.".
Result<std::optional<OpenCheckpoint>> open_parts(const PathSnapshot& place, const OpenOptions& options);

// Returns the subdirectory of a step's directory that is its checkpoint; null if there is none.
Result<const PathSnapshot*> checkpoint_of_step(const PathSnapshot& place);

// Adds to an open model the numbered optimizer state next to it: without FSDP, Accelerate (optimizer.bin) and Trainer
// (optimizer.pt) save torch's own, which numbers the parameters (numbered_optimizer.h). If the numbers cannot be given
// names, a note says why (`config` as OpenOptions::config). Warns if moments have shapes that no parameter of the model
// has, also if the optimizer was opened and its model is next to it. Ignores files that cannot be read.
Status join_optimizers(const PathSnapshot& place, const std::string& config, OpenCheckpoint& open);

// Returns the first file of optimizer state next to an open model that its writer has not finished: it is empty or its
// end is missing. Returns an empty text if there is none.
Result<std::string> unfinished_optimizer(const PathSnapshot& place, const Catalog& model);

// Returns the file that Hugging Face's Trainer writes last into a step, if this is a step that it seems to be writing;
// otherwise an empty text. After the model, it may gather the optimizer for minutes before it creates its file.
std::string awaited_file(const PathSnapshot& place);

// Returns the checkpoints below a run's directory, on the first level that has any, up to four down: directories, and
// files whose names have the number of a step. Those of one directory are in the order of their steps: first names
// without a number ("final"), then directories with other numbers ("version_9", "version_10") in natural order. Skips
// directories that may not be listed, links to another of them ("latest"), and a last.ckpt that is no newer than the
// steps next to it. Looks at no more than 10,000 directories and files; of a directory with more it takes the newest.
Result<std::vector<std::string>> checkpoints_of_run(const std::string& path);

// Returns the models that a run saves next to each other ("unet", "vae"): the checkpoints in the directory of
// `checkpoint`, itself included. They are models and not steps if no name has the number of a step ("checkpoint-8") and
// one of these holds: the numbers in them are no versions ("version_9") or dates; the directory is that of one step;
// they are modules of one pipeline. Otherwise, or if there is only one, the result is empty.
Result<std::vector<std::string>> sibling_models(const std::string& checkpoint, const std::vector<std::string>& all);

// Returns whether a name is that of Lightning's newest step, whose number is only in the file: "last.ckpt",
// "last-v1.ckpt".
bool is_last_of_lightning(std::string_view name);

// Returns the step in a checkpoint's name: the number after the last "step", or else the last number. Returns -1 if the
// name has no number.
Index step_in_name(std::string_view name);
}  // namespace reshard
