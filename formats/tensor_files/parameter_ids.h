// Which parameter an optimizer's integer id means.
//
// torch.optim stores the states of an optimizer under running numbers and no names (Optimizer.state_dict() of
// torch/optim/optimizer.py), and ColossalAI and verl keep them. The numbers count the parameters of the optimizer's
// groups one after the other, as they were before anything was sharded: with one group the order in which the model
// defines its parameters, with several the same order within each.
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

// What the optimizer's files tell of one id.
struct ParameterId {
  Index id = 0;
  std::optional<Dims> shape;  // of its moments; nothing where it has none
  bool is_fresh = false;      // it has no state at all yet
};

struct ParameterNames {
  std::vector<std::string> names;  // of each id, in order; empty: not known
  std::string evidence;            // a phrase for people: how they are known, or why not
};

// How the names of a checkpoint's parameters are ordered.
enum class NameOrder {
  kAsDefined,  // as the model defines them
  kByStage,    // likewise within each pipeline stage; the stages' layers may interleave, experts be out of order
  kSorted,     // as an index sorts them: the model's own order is to be found
};

// `parameters` in the order in which the checkpoint has them. `ids` ascending, `groups` the ids of each group. An order
// that is possible counts when there are as many parameters as ids and each id's moments have its parameter's shape, or
// are as many in one row; one that fits is taken, several that differ are not. Where all ids are fresh and of one
// group, which is which makes no difference, and the first possible order is taken.
ParameterNames name_parameters(const std::vector<NamedShape>& parameters, NameOrder order,
                               const std::vector<ParameterId>& ids, const std::vector<std::vector<Index>>& groups);

}  // namespace reshard
