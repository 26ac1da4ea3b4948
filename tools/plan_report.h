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

// What a view is of, for people.
void print_view_plan(const PreparedConversion& prepared);

// How the job is to be run on `ranks` ranks: as --strategy says, or as it is estimated.
struct ChosenStrategy {
  Strategy strategy = Strategy::kDirect;
  StrategyChoice estimate;
};
ChosenStrategy choose_strategy(const Conversion& conversion, const ConvertOptions& options, Index ranks,
                               Index machines);
// How evenly the ranks of a mesh would load, for people.
std::string mesh_text(const std::vector<Index>& bytes_of_ranks);
void print_strategy(const ChosenStrategy& chosen, Index ranks, Index machines);

// Bytes free where `destination` is to be made.
Result<Index> free_space_for(const std::string& destination);

}  // namespace reshard::tools
