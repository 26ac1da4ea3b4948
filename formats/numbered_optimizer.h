// SPDX-License-Identifier: Apache-2.0
// torch.optim's own state next to its model: {"state": {0: {"exp_avg": ...}, ...}, "param_groups": [{"params": [0, 1]},
// ...]}. It names no parameter. A number is a parameter's place among those that were given to the optimizer: group by
// group, and in each group in the order of model.named_parameters(). transformers' Trainer and the usual recipes make
// two groups, of matrices, which decay, and of biases and norms (transformers/trainer_pt_utils.py,
// get_parameter_names).
#pragma once

#include <memory>
#include <string>

#include "lib/checkpoint/format.h"

namespace reshard {

// The result of name_parameters().
struct NamedOptimizer {
  std::unique_ptr<Reader> reader;  // of the optimizer, with names instead of numbers; null if they are unknown
  std::string why_not;             // the reason, a clause, if `reader` is null
};

// Names the parameters of an open optimizer by the model that is open next to it. They are named if the order of the
// model's parameters is known, which a torch.save file records (`is_ordered`) and a table has of models of
// transformers, if every moment has the shape of its parameter, and if no other way to make the groups fits as well.
// Otherwise the optimizer is closed.
NamedOptimizer name_parameters(std::unique_ptr<Reader> optimizer, Reader& model, bool is_ordered);

}  // namespace reshard
