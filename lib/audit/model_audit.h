// Holds a checkpoint's tensors against the model that a config.json describes: names, shapes, dtypes. Looks at metadata
// only.
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/model/model.h"

namespace reshard {

struct ModelAudit {
  std::vector<Finding> findings;
  Index expected_tensors = 0;  // of the config's table, tied ones left out
  Index expected_elements = 0;
  Index looked_at = 0;        // model tensors of the checkpoint that the family knows
  bool head_is_tied = false;  // and not stored
  Index padded_rows = 0;  // of the vocabulary, under names of a trainer that pads it; 0: none, or the writer says so
  std::string uniform_dtype;  // "float32" where all parameters have this one and the config names another, wider
                              // than it: ordinary for training state, so no finding
};

// `model` is described. Fails only where the config lacks what the table needs.
Result<ModelAudit> audit_model(const Catalog& catalog, const Model& model);

}  // namespace reshard
