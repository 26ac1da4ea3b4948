// SPDX-License-Identifier: Apache-2.0
// A family for a model that no family file describes, made from the table of transformers' classes (architecture.h).
#pragma once

#include "lib/base/result.h"
#include "lib/model/config.h"
#include "lib/model/family.h"

namespace reshard {

// Returns a family that lists the parameters of this config's model, one rule for each, with its shape in numbers. It
// describes no other model, no other names, and no tensor or pipeline parallelism. Returns null if the table does not
// have the model_type and the class, and fails with unsupported if it describes only a part of the model. The result
// lives as long as the process. Thread-safe.
Result<const Family*> class_family(const ModelConfig& config);

// Returns whether class_family() made this family.
bool is_class_family(const Family& family);

}  // namespace reshard
