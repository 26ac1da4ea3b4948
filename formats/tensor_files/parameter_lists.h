// The lists of parameters in an optimizer's groups, "optimizer.param_groups.0.params": torch's loader finds a group by
// the names in it (torch/distributed/checkpoint/state_dict.py, _split_optim_state_dict).
#pragma once

#include <string>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

// The pickle of such a list.
std::string pickled_names(const std::vector<std::string>& names);

// Gives the parameters of these lists, which are the source's, their names in the output (LayoutRequest::renamed).
// Once: none is left in the request. Objects that are no lists of names stay as they are.
Status rename_parameter_lists(LayoutRequest& request);

}  // namespace reshard
