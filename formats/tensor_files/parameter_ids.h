// SPDX-License-Identifier: Apache-2.0
// Names for the integer ids of an optimizer's states.
//
// torch.optim stores the states of an optimizer under running numbers instead of names (Optimizer.state_dict() in
// torch/optim/optimizer.py); ColossalAI and verl keep the numbers. They count the parameters of the groups one after
// the other, before sharding. So with one group the numbers follow the order in which the model defines its parameters;
// with several groups that order holds within each group.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/base/result.h"
#include "lib/layout/box.h"

namespace reshard {

struct NamedShape {
  std::string name;
  Dims shape;
};

// What the optimizer's files say about one id.
struct ParameterId {
  Index id = 0;
  std::optional<Dims> shape;  // of its moments; nothing if it has no moments
  bool is_fresh = false;      // it has no state yet
};

struct ParameterNames {
  std::vector<std::string> names;  // one for each id, in order; empty if unknown
  std::string evidence;            // for people: how the names were found, or why they could not be
};

// How the names of a checkpoint's parameters are ordered.
enum class NameOrder {
  kAsDefined,  // in the order in which the model defines them
  kByStage,    // in that order within each pipeline stage; layers of stages may interleave, experts be out of order
  kSorted,     // sorted by an index, so the model's order has to be found
};

// Finds the parameter of each id. `parameters` are in the order of the checkpoint, `ids` are ascending, `groups` has
// the ids of each group.
//
// An order of the parameters fits if there are as many parameters as ids and the moments of each id have the shape of
// its parameter, or are a vector with as many elements. If exactly one order fits, it is the answer. If several fit and
// differ, the names stay unknown. If all ids are fresh and in one group, the choice makes no difference and the first
// possible order is taken.
ParameterNames name_parameters(const std::vector<NamedShape>& parameters, NameOrder order,
                               const std::vector<ParameterId>& ids, const std::vector<std::vector<Index>>& groups);

}  // namespace reshard
