// Where the parameters of a group lie in the vectors of its ranks (deepspeed.h draws them).
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
};

// Elements [begin, end) of a parameter, `at` elements into a rank's vector.
struct Run {
  std::size_t rank = 0;  // of those with states: an index
  Index begin = 0, end = 0, at = 0;
};

// A parameter and its runs, which cover it once.
struct FlatParameter {
  NamedShape parameter;
  std::size_t group = 0;
  std::vector<Run> runs;
};

// All parameters of these groups. `ranks` are those of one model-parallel part, in order, and there is one at least.
// Corrupt where the vectors are not as long as the parameters need, or cut into other counts than `ranks`: the message
// says which file. An expert group's names, which are rank 0's, become those of the whole model.
Result<std::vector<FlatParameter>> find_parameters(const std::vector<RankStates>& ranks,
                                                   const std::vector<Group>& groups);

// The same where the model states name no parameters (BF16_Optimizer without ZeRO): by the slices that each rank's
// states name, of parameters of these shapes.
Result<std::vector<FlatParameter>> find_parameters(const std::vector<RankStates>& ranks,
                                                   const std::map<std::string, Dims>& shapes);

// Whether a group's parameters are experts.
bool is_expert_group(const Group& group);

// The number of the expert in a parameter's name, and where its digits are; nothing for others.
struct ExpertNumber {
  std::size_t begin = 0, end = 0;
  Index number = 0;
};
std::optional<ExpertNumber> expert_number(std::string_view name);

}  // namespace reshard::deepspeed
