// SPDX-License-Identifier: Apache-2.0
// Checks optimizer state against its parameters, for any model: shapes, and missing state. Uses metadata only.
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/checkpoint/catalog.h"

namespace reshard {

struct OptimizerAudit {
  std::vector<Finding> findings;
  Index looked_at = 0;  // tensors of optimizer state that name their parameter
};

// Findings "optimizer-shape" (error), "optimizer-orphan" and "optimizer-missing" (warnings).
OptimizerAudit audit_optimizer(const Catalog& catalog);

}  // namespace reshard
