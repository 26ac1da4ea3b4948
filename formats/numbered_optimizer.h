// SPDX-License-Identifier: Apache-2.0
// torch.optim's own state next to its model: {"state": {0: {"exp_avg": ...}, ...}, "param_groups": [{"params": [0, 1]},
// ...]}. It numbers the parameters instead of naming them: group by group, and within a group in the order of
// model.named_parameters(). transformers' Trainer and the usual recipes make two groups: matrices, which have weight
// decay, and biases and norms, which have none (transformers/trainer_pt_utils.py, get_parameter_names).
#pragma once

#include <memory>
#include <string>

#include "lib/checkpoint/format.h"

namespace reshard {

// The result of with_parameter_names().
struct NamedOptimizer {
  std::unique_ptr<Reader> reader;  // of the optimizer, with names instead of numbers; null if they are unknown
  std::string why_not;             // the reason, a clause, if `reader` is null
};

// Gives the parameters of an open optimizer the names of the model next to it. That needs a known order of the model's
// parameters (a torch.save file has it, `is_ordered`; a table has it for models of transformers, by the model type in
// the file `config` or, if that is empty, in the config.json next to the model), moments with the shapes of their
// parameters, and no other assignment to groups that fits as well. Otherwise closes the optimizer and says why.
NamedOptimizer with_parameter_names(std::unique_ptr<Reader> optimizer, Reader& model, const std::string& config,
                                    bool is_ordered);

}  // namespace reshard
