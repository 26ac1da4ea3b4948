// Optimizer state beside the parameters it is of, whatever the model: shapes, and what is missing. Looks at metadata
// only.
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/checkpoint/catalog.h"

namespace reshard {

struct OptimizerAudit {
  std::vector<Finding> findings;
  Index looked_at = 0;  // tensors of optimizer state that tell which parameter they are of
};

// Findings "optimizer-shape" (error), "optimizer-orphan" and "optimizer-missing" (warnings).
OptimizerAudit audit_optimizer(const Catalog& catalog);

}  // namespace reshard
