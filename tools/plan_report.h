// SPDX-License-Identifier: Apache-2.0
// A plan as people and programs read it.
#pragma once

#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/plan/cost.h"
#include "tools/preparation.h"

namespace reshard::tools {

void print_plan(const PreparedConversion& prepared, const ConvertOptions& options);
Json plan_json(const PreparedConversion& prepared, const ConvertOptions& options, std::string_view command);

// Prints what a view refers to.
void print_view_plan(const PreparedConversion& prepared);

// How several ranks share the job: by --strategy, or whichever is estimated to be faster.
struct ChosenStrategy {
  Strategy strategy = Strategy::kDirect;
  StrategyChoice estimate;
};
ChosenStrategy choose_strategy(const Conversion& conversion, const ConvertOptions& options, Index ranks,
                               Index machines);
// Describes how evenly the ranks of a mesh would load: the largest, and its distance from the mean.
std::string mesh_text(const std::vector<Index>& bytes_of_ranks);
void print_strategy(const ChosenStrategy& chosen, Index ranks, Index machines);

// Approximate numbers of requests that a conversion sends to object stores; 0 for a local side.
struct RequestCounts {
  Index read = 0, write = 0;
};
RequestCounts requests_of(const Conversion& conversion, const ConvertOptions& options);

// Returns the bytes that are free in the file system of `destination`.
Result<Index> free_space_for(const std::string& destination);

}  // namespace reshard::tools
