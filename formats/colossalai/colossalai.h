// SPDX-License-Identifier: Apache-2.0
// Checkpoints of ColossalAI's Booster (colossalai/checkpoint_io): a directory of whole tensors, or a tree of such
// directories.
//
//   epoch-0_step-7/                       written by the training applications
//     modeling/                           the model: shards, their index, config.json
//     optimizer/                          shards by parameter id, their index, pytorch_optim_group.bin
//     lr_scheduler                        one torch.save file
//     running_states.json                 {"epoch": 0, "step": 7, ...}
//
// names.h describes the names of the shards, formats/encoding/weight_index.h the index. With pipeline stages, each
// stage writes an index into tmp_index_files/, and they are joined at the end. If that directory still exists, the save
// was interrupted. Releases before 0.3.2 could also write per-rank files (rank_files.h).
//
// Optimizer states are stored under integer ids, whose parameters formats/tensor_files/parameter_ids.h finds. They are
// read under torchtitan's names (optimizer.state.<parameter>.exp_avg), the scheduler's values as lr_scheduler.*, and
// running_states.json as train_state.*. See docs/formats/colossalai.md.
#pragma once

#include "formats/colossalai/names.h"
#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kColossalaiFormat;

namespace colossalai {

Result<bool> has_file(const std::string& path);  // returns false for a directory

// The files of the model, or of the optimizer, in a directory.
struct PartFiles {
  std::vector<std::string> indexes;  // those of the whole part, not of a stage
  std::vector<std::string> shards;
};

PartFiles files_of(const PathSnapshot& directory, Part part);

// Returns the name of the only file of an unsharded save in a directory without index and shards, or an empty text.
std::string single_file(const PathSnapshot& directory, Part part);

// The parts of a checkpoint to open, as paths below the root.
struct Tree {
  std::string root;
  const PathSnapshot* place = nullptr;  // the root; null with an optimizer_file. Owned by the snapshot that was opened
  std::string model, optimizer;         // their directories; "" is the root itself
  bool has_model = false;
  bool has_optimizer = false;
  bool is_application = false;  // a tree of modeling/, optimizer/ and so on
  std::string index;            // the model's index, if the caller opened one
  std::string optimizer_file;   // a file in the root with a whole optimizer; then nothing else is opened
};

// Returns whether a file's first bytes are those of an optimizer that the Booster saved with shard=False: a dict whose
// first key is "param_groups", or safetensors with pickles among the tensors.
bool is_optimizer_file(const PathSnapshot& place);

Result<Tree> tree_of(const PathSnapshot& place);

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// Lays out a model as the Booster saves one with shard=True, which its CheckpointIO loads:
//
//   model-00001.safetensors                       always a counter, never "-of-"
//   model-stage-00001-shard-00001.safetensors     with a pipeline: the tensors of stage 1
//   model.safetensors.index.json                  {"metadata": {"total_size": MiB}, "weight_map": {tensor: file}}
//
// In the torch.save container these are pytorch_model-00001.bin and so on, with pytorch_model.bin.index.json. Files
// hold whole tensors under Hugging Face names at any degree of tensor parallelism, as the loader cuts them itself.
// (colossalai/checkpoint_io/utils.py, general_checkpoint_io.py, hybrid_parallel_checkpoint_io.py)
// Fails with kUnsupported for a mesh with an axis other than pp.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);

}  // namespace colossalai
}  // namespace reshard
