// SPDX-License-Identifier: Apache-2.0
// Checks what names and shapes tell about a model without a config: adapters that were not merged, empty placeholders,
// one parameter with two names, shapes that contradict each other. Uses metadata only.
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/model/model.h"

namespace reshard {

// Findings: "adapter-unmerged" (warning), "placeholder" (error), and if no config describes the model, so that
// audit_model() does not report them, "name-duplicate" and "shape-contradiction" (errors).
std::vector<Finding> audit_names(const Catalog& catalog, const Model& model);

// Returns whether a tensor is an empty weight, which no parameter should be.
bool is_placeholder(const Tensor& tensor, const Model& model);

}  // namespace reshard
