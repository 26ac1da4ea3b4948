// SPDX-License-Identifier: Apache-2.0
// Finds the parameters of a group in the vectors of its ranks (drawn in deepspeed.h).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "formats/deepspeed/rank_files.h"

namespace reshard::deepspeed {

// The optimizer states of one rank, and the path of their file.
struct RankStates {
  std::string path;
  OptimizerStates states;
  bool is_unread = false;  // the file cannot be read; `states` are those of another rank, whose vectors are as long
};

// Elements [begin, end) of a parameter, which start at element `at` of a rank's vector.
struct Run {
  std::size_t rank = 0;  // index into the ranks with states
  Index begin = 0, end = 0, at = 0;
};

// A parameter and its runs, which cover it once.
struct FlatParameter {
  NamedShape parameter;
  std::size_t group = 0;
  std::vector<Run> runs;
  bool is_expert = false;  // one of AutoEP's
};

// Returns all parameters of these groups. `ranks` are those of one model-parallel part, in order, at least one. Fails
// with kCorrupt, naming the file, if a vector does not have the length that the parameters need, or was cut into
// another number of runs than there are ranks. The names in a group of experts, which are rank 0's, become those of the
// whole model; each expert of `stacked` is a parameter of its own.
Result<std::vector<FlatParameter>> find_parameters(const std::vector<RankStates>& ranks,
                                                   const std::vector<Group>& groups,
                                                   const StackedExperts& stacked = {});

// Does the same if the model states do not list the parameters (BF16_Optimizer without ZeRO), from the slices in each
// rank's optimizer states and the shapes of the parameters.
Result<std::vector<FlatParameter>> find_parameters(const std::vector<RankStates>& ranks,
                                                   const std::map<std::string, Dims>& shapes);

// The number of the expert in a parameter's name, and the position of its digits.
struct ExpertNumber {
  std::size_t begin = 0, end = 0;
  Index number = 0;
};
std::optional<ExpertNumber> expert_number(std::string_view name);

// Returns the name of one of AutoEP's experts, as in its file.
std::string expert_name(const std::string& stacked, Index expert);

}  // namespace reshard::deepspeed
