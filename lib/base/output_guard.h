// SPDX-License-Identifier: Apache-2.0
// Keeps a job from writing over what it reads.
#pragma once

#include <string>
#include <vector>

#include "lib/base/result.h"

namespace reshard {

// Returns a usage error if writing to `output`, a file or directory that need not exist, would change one of `inputs`
// (files and directories; missing ones are ignored). Every output of every command is checked with it. That is the case
// if `output`
// - is an input or a file inside one, by any path, link or hard link (device and inode are compared);
// - is inside an input directory, even if that directory is also mounted elsewhere;
// - is a directory that contains an input.
Status check_spares_inputs(const std::string& output, const std::vector<std::string>& inputs);

}  // namespace reshard
