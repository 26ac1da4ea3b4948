// Files of ranks: each file is what one rank of a mesh holds, its local tensors under the model's names, so that a rank
// of that mesh reads one file and nothing else.
//
//   rank-00000.safetensors     the local tensors of rank 0 (or .bin: torch.save)
//   rank-00001.safetensors     ...
//   reshard_layout.json        the layout descriptor (docs/layout.md): mesh, cuts and stages. With it the files join
//                              to whole tensors again
//
// Directories that people wrote themselves, torch.save of each rank's state_dict, are read too: files whose names
// differ only in the number of the rank. How they join is for the user to say, or for the model's family where it
// leaves no doubt (lib/infer/rank_layout.h).
#pragma once

#include <map>

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kRanksFormat;

namespace ranks {

inline constexpr std::string_view kLayoutFile = "reshard_layout.json";

// The files of a directory of ranks: their names differ only in the number of a rank ("rank3", "rank_03", "tp_1",
// "mp_rank_01").
struct RankFiles {
  std::map<Index, std::string> by_rank;
  std::vector<std::string> others;  // files of tensors that are of no rank
  bool has_layout = false;
  bool has_index = false;
  bool is_ambiguous = false;  // files of two patterns, or two of one rank
};
RankFiles find_files(const PathSnapshot& directory);

// The tensors joined under options.layout, or under the directory's own descriptor, or as the model's family has it
// (lib/infer/rank_layout.h; a config.json beside the files or one level up is consulted). A layout without a mesh is
// taken to be for tp ranks alone. Corrupt where ranks lack a tensor, or hold another part of it than the layout says;
// padding rows of a vocabulary stay in the joined tensor. Objects that are no tensors are left out with a warning.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// One file for each rank of request.mesh, a stage's tensors on its ranks only, replicated tensors in the file of every
// rank that holds them; and the descriptor, which names every tensor.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);

}  // namespace ranks
}  // namespace reshard
