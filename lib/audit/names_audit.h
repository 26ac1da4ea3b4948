// What names and shapes tell of a model without its config: adapters that were not merged, weights that are empty
// placeholders, one parameter under two names, shapes of no model. Looks at metadata only.
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/model/model.h"

namespace reshard {

// Findings "adapter-unmerged" (warning), "placeholder" (error), and where no config describes the model, so that
// audit_model does not say it, "name-duplicate" and "shape-contradiction" (errors).
std::vector<Finding> audit_names(const Catalog& catalog, const Model& model);

// Whether no parameter is expected to be so: an empty weight.
bool is_placeholder(const Tensor& tensor, const Model& model);

}  // namespace reshard
