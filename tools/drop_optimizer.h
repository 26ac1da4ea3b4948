// SPDX-License-Identifier: Apache-2.0
// Takes the optimizer out of a checkpoint, in place.
#pragma once

#include <string>

#include "tools/job_options.h"

namespace reshard::tools {

// Replaces the Distributed Checkpoint in the directory `source` by one without its optimizer, atomically. Everything
// else in the directory stays: other state, and files that are not the checkpoint's. `work` is a path in the same
// directory as `source`; what a killed run leaves at paths that begin with it may be removed at any time. Returns false
// if the checkpoint has no optimizer. Fails (unsupported) for other formats, and if the directory contains links.
Result<bool> drop_optimizer(const std::string& source, const std::string& work, const ResourceOptions& resources);

}  // namespace reshard::tools
