// The optimizer states of the ranks of one part, held against each other and joined.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "formats/deepspeed/file_set.h"
#include "formats/deepspeed/flat_groups.h"
#include "lib/checkpoint/catalog.h"

namespace reshard::deepspeed {

// That the states are of the ZeRO stage that the names tell of; corrupt otherwise.
Status check_stage(const FileSet& set, Index part, const std::vector<RankStates>& ranks);

// That what is a number and no vector is the same on all ranks: the step. Corrupt otherwise.
Status check_steps(FilePool& files, const std::vector<RankStates>& ranks);

// The vectors of one kind as a tensor of the parameter, called `name`; `flat` gives a rank's, or null. Corrupt where
// one is missing, too short or of another dtype.
Result<Tensor> join(const FlatParameter& parameter, const std::vector<RankStates>& ranks, std::string name,
                    const std::function<const StoredTensor*(const OptimizerStates&)>& flat);

}  // namespace reshard::deepspeed
