// SPDX-License-Identifier: Apache-2.0
// The lists of parameter names in an optimizer's groups, "optimizer.param_groups.0.params". torch's loader finds a
// group by these names (torch/distributed/checkpoint/state_dict.py, _split_optim_state_dict).
#pragma once

#include <string>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

// Returns the pickle of such a list.
std::string pickled_names(const std::vector<std::string>& names);

// Renames the parameters in these lists, which have the source's names, as LayoutRequest::renamed says, and clears
// `renamed` so that a second call does nothing. Objects that are not lists of names are left unchanged.
Status rename_parameter_lists(LayoutRequest& request);

}  // namespace reshard
