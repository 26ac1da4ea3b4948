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

#include "lib/checkpoint/format.h"

namespace reshard {

inline constexpr std::string_view kLayoutFile = "reshard_layout.json";

extern const Format kRanksFormat;

}  // namespace reshard
