// What a job may write: nothing that would change what it reads.
#pragma once

#include <string>
#include <vector>

#include "lib/base/result.h"

namespace reshard {

// Decides for every output of every command. Returns a usage error if writing to `output`, a file or a directory that
// need not exist, would change one of `inputs` (files and directories; those that do not exist are ignored). That is so
// if `output`
// - is an input, or a file inside one, by whatever path, link or second name (device and inode are compared);
// - is inside an input that is a directory, though it be mounted elsewhere, too;
// - is a directory that holds an input.
Status check_spares_inputs(const std::string& output, const std::vector<std::string>& inputs);

}  // namespace reshard
