// SPDX-License-Identifier: Apache-2.0
// Files of FSDP's ranks: torch.save files with one rank's DTensors, ShardedTensors and plain tensors
// (formats/encoding/distributed_tensor.h). A distributed tensor records its place in the whole.
//
// verl (verl/utils/checkpoint/fsdp_checkpoint_manager.py), W ranks:
//
//   global_step_2/actor/model_world_size_W_rank_R.pt         model.state_dict(): {name: tensor}
//                       optim_world_size_W_rank_R.pt         optimizer.state_dict():
//                                                            {"state": {0: {"exp_avg", ...}, ...},
//                                                             "param_groups": [{"lr", ..., "params": [0, 1, ...]}]}
//                       extra_state_world_size_W_rank_R.pt   {"lr_scheduler": {...}, "rng": {...}}
//                       fsdp_config.json                     {"FSDP_version": 2, "world_size": W}
//                       huggingface/                         config.json, tokenizer
//
// Accelerate, and transformers' Trainer, without Distributed Checkpoint (accelerate/utils/fsdp_utils.py), the M-th
// model:
//
//   pytorch_model_fsdp_M_rankR.bin      {name: tensor}
//   optimizer_M_rankR.bin               {"state": {name: {"exp_avg", ...}, ...}, "param_groups": [...]}
//
// A distributed tensor is joined from the parts of all ranks; plain and replicated tensors are in every file. Numbered
// optimizer states get the names of their parameters (optimizer_states.h). See docs/formats/fsdp.md.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kFsdpFormat;

namespace fsdp {

enum class Role { kModel, kOptimizer, kExtra };
inline constexpr std::array<Role, 3> kRoles = {Role::kModel, Role::kOptimizer, Role::kExtra};
inline constexpr std::string_view kSettingsFile = "fsdp_config.json";
inline constexpr std::string_view kModelDirectory = "huggingface";

// A parsed file name.
struct FileName {
  Role role = Role::kModel;
  std::string before, after;
  Index rank = 0;
  std::string save;            // equal for all files of a save: "world_size_4", or the number of the model
  std::optional<Index> ranks;  // the number of ranks, if the name gives it
};
std::optional<FileName> parse_file_name(std::string_view name);

// The files of one save.
struct FileSet {
  std::string directory;
  bool is_verl = false;
  Index ranks = 0;
  std::array<std::map<Index, std::string>, kRoles.size()> files;  // by role and rank; a role has all ranks or none

  const std::map<Index, std::string>& of(Role role) const { return files[static_cast<std::size_t>(role)]; }
};

// Finds the files of a save: those in a directory, or those that belong to the file `place`. Fails with kIo, naming the
// missing files, if a rank has none. Fails with kUnsupported if a directory has files of two saves.
Result<FileSet> find_files(const PathSnapshot& place);

// Returns the files that are missing for `ranks` ranks: "2 files ('model_world_size_4_rank_1.pt', ...)", or an empty
// text.
std::string missing_text(const FileSet& set, Index ranks);

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

}  // namespace fsdp
}  // namespace reshard
