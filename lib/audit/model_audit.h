// SPDX-License-Identifier: Apache-2.0
// Checks a checkpoint's tensors against the model that a config.json describes: names, shapes, dtypes. Uses metadata
// only.
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/model/model.h"

namespace reshard {

struct ModelAudit {
  std::vector<Finding> findings;
  Index expected_tensors = 0;  // in the config's table, without tied ones
  Index expected_elements = 0;
  Index looked_at = 0;        // model tensors of the checkpoint that the family knows
  bool head_is_tied = false;  // and not stored
  Index padded_rows = 0;  // of the vocabulary, with names of a trainer that pads it; 0: none, or the writer records it
  // The dtype of all parameters, "float32", if it is wider than the config's. Normal for training state, so it is not a
  // finding.
  std::string uniform_dtype;
};

// Requires a described model (Model::is_described()). Fails only if the config lacks numbers that the table needs.
Result<ModelAudit> audit_model(const Catalog& catalog, const Model& model);

}  // namespace reshard
