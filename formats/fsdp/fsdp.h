// Files of FSDP's ranks: torch.save of what one rank has, its DTensors or ShardedTensors and plain tensors
// (formats/encoding/distributed_tensor.h), which say themselves where they belong.
//
// verl (verl/utils/checkpoint/fsdp_checkpoint_manager.py), W ranks:
//
//   global_step_2/actor/model_world_size_W_rank_R.pt         model.state_dict(): {name: tensor}
//                       optim_world_size_W_rank_R.pt         optimizer.state_dict(): {"state": {0: {"exp_avg", ...},
//                       ...},
//                                                            "param_groups": [{"lr", ..., "params": [0, 1, ...]}]}
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
// A tensor is all ranks' parts of it; a plain one, and what ranks replicate, is stored by each. States under numbers
// get their parameters' names (optimizer_states.h). Described in docs/formats/fsdp.md.
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

// A file name around the number of its rank.
struct FileName {
  Role role = Role::kModel;
  std::string before, after;
  Index rank = 0;
  std::string save;            // what names of one save have in common: "world_size_4", or the number of the model
  std::optional<Index> ranks;  // how many there are, where the name tells
};
std::optional<FileName> parse_file_name(std::string_view name);

// The files of one save.
struct FileSet {
  std::string directory;
  bool is_verl = false;
  Index ranks = 0;
  std::array<std::map<Index, std::string>, kRoles.size()> files;  // by role and rank: none of a role, or all

  const std::map<Index, std::string>& of(Role role) const { return files[static_cast<std::size_t>(role)]; }
};

// Those in a directory, or with the file that the place is. An I/O error that names what is missing where a rank has no
// file; unsupported where the files are of two saves, unless the place says which.
Result<FileSet> find_files(const PathSnapshot& place);

// "2 files ('model_world_size_4_rank_1.pt', ...)": what is not there of `ranks` ranks; empty where all is.
std::string missing_text(const FileSet& set, Index ranks);

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

}  // namespace fsdp
}  // namespace reshard
