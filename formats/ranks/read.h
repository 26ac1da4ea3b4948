// Reads the files of ranks as whole tensors. See ranks.h.
#pragma once

#include <memory>
#include <string>

#include "lib/checkpoint/format.h"

namespace reshard {

// A directory with a reshard_layout.json, or with two or more files of tensors whose names differ only in the number of
// a rank ("rank3", "rank_03", "tp_1", "mp_rank_01") and with no index.
bool recognises_ranks(const std::string& path);

// The tensors joined under options.layout, or under the directory's own descriptor, or as the model's family has it
// (lib/infer/rank_layout.h; a config.json beside the files or one level up is consulted). A layout without a mesh is
// taken to be for tp ranks alone. Corrupt where ranks lack a tensor, or hold another part of it than the layout says;
// padding rows of a vocabulary stay in the joined tensor. Objects that are no tensors are left out with a warning.
Result<std::unique_ptr<Reader>> open_ranks(const std::string& path, const OpenOptions& options);

}  // namespace reshard
