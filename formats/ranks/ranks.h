// SPDX-License-Identifier: Apache-2.0
// Files of ranks: each file has the local tensors of one rank of a mesh under the model's names, so that a rank reads
// only its own file.
//
//   rank-00000.safetensors     the local tensors of rank 0 (or .bin: torch.save)
//   rank-00001.safetensors     ...
//   reshard_layout.json        the layout descriptor (docs/layout.md): mesh, cuts and stages, with which the files can
//                              be joined again
//
// Also read are directories of torch.save files of each rank's state_dict, written by a user's own program. The names
// of such files must differ only in the number of the rank. The layout is given by the user, or inferred from the
// model's family if it is unambiguous (lib/infer/rank_layout.h).
#pragma once

#include <map>

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kRanksFormat;

namespace ranks {

inline constexpr std::string_view kLayoutFile = "reshard_layout.json";

// The files of a directory of ranks. Their names differ only in the number of the rank ("rank3", "rank_03", "tp_1",
// "mp_rank_01", fairseq2's "sdp_00").
struct RankFiles {
  std::map<Index, std::string> by_rank;
  std::vector<std::string> others;  // files of tensors that do not belong to a rank
  bool has_layout = false;
  bool has_index = false;
  bool is_ambiguous = false;  // names of two patterns, or two files of one rank
};
RankFiles find_files(const PathSnapshot& directory);
// Returns another rank's file of the same save as `file`: its name, or its directory's, differs only in the number of
// the rank. Empty if there is none.
Result<std::string> other_rank_of(const PathSnapshot& file);

// Opens a directory of ranks and joins the tensors under options.layout, the directory's descriptor, or a layout
// inferred from the model's family (lib/infer/rank_layout.h), which uses a config.json next to the files or one level
// up. A layout without a mesh is applied to one axis, tp. Fails with kCorrupt if a rank lacks a tensor, or holds
// another part than the layout says. Padding rows of a vocabulary stay in the joined tensor. Other objects are left out
// with a warning.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// Lays out one file for each rank of request.mesh, and the descriptor, which names every tensor. A stage's tensors are
// in the files of its ranks, replicated tensors in the file of every rank that holds them.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);

}  // namespace ranks
}  // namespace reshard
