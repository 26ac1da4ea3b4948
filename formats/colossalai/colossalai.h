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
// Optimizer states are stored under integer ids; formats/tensor_files/parameter_ids.h finds the parameters. They appear
// under torchtitan's names (optimizer.state.<parameter>.exp_avg), the scheduler's values as lr_scheduler.*, those of
// running_states.json as train_state.*. Described in docs/formats/colossalai.md.
#pragma once

#include "formats/colossalai/names.h"
#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kColossalaiFormat;

namespace colossalai {

bool has_file(const std::string& path);  // and it is no directory

// A directory's files of one part.
struct PartFiles {
  std::vector<std::string> indexes;  // of the whole part
  std::vector<std::string> shards;
};

PartFiles files_of(const PathSnapshot& directory, Part part);

// The name of the one file of an unsharded save, in a directory without an index and shards; empty where there is none.
std::string single_file(const PathSnapshot& directory, Part part);

// What is to be opened, as paths below the root.
struct Tree {
  std::string root;
  const PathSnapshot* place =
      nullptr;                   // what stands at the root; null with an optimizer_file. Lives as what was opened
  std::string model, optimizer;  // their directories; "" is the root itself
  bool has_model = false;
  bool has_optimizer = false;
  bool is_application = false;  // modeling/, optimizer/ and so on
  std::string index;            // the model's, where the caller chose one
  std::string optimizer_file;   // in the root: one that holds a whole optimizer, and nothing else is to be opened
};

// Whether the file is an optimizer as the Booster saves it with shard=False, by its first bytes: a dict of which
// "param_groups" is the first key, or safetensors with pickles among the tensors.
bool is_optimizer_file(const PathSnapshot& place);

Result<Tree> tree_of(const PathSnapshot& place);

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// A model as the Booster saves one with shard=True, for its CheckpointIO to load:
//
//   model-00001.safetensors                       always a counter, never "-of-"
//   model-stage-00001-shard-00001.safetensors     with a pipeline: the tensors of stage 1
//   model.safetensors.index.json                  {"metadata": {"total_size": MiB}, "weight_map": {tensor: file}}
//
// or pytorch_model-00001.bin and so on with pytorch_model.bin.index.json in the torch.save container. Files hold whole
// tensors under Hugging Face names whatever the degree of tensor parallelism: the loader cuts them itself.
// (colossalai/checkpoint_io/utils.py, general_checkpoint_io.py, hybrid_parallel_checkpoint_io.py)
// Unsupported for a mesh with another axis than pp.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);

}  // namespace colossalai
}  // namespace reshard
