// SPDX-License-Identifier: Apache-2.0
// Checks packed weights (quantization.h) by themselves: all tensors are present, and their shapes fit together. Uses
// metadata only.
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/model/model.h"

namespace reshard {

struct PackedAudit {
  std::vector<Finding> findings;
  Index looked_at = 0;  // packed weights
  std::string text;     // "14 weights packed as GPTQ"; empty: none
};

PackedAudit audit_packed(const Catalog& catalog, const Model& model);

}  // namespace reshard
