// SPDX-License-Identifier: Apache-2.0
// Compares and joins the optimizer states of the ranks of one part.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "formats/deepspeed/file_set.h"
#include "formats/deepspeed/flat_groups.h"
#include "lib/checkpoint/catalog.h"

namespace reshard::deepspeed {

// Fails with kCorrupt unless the states are of the ZeRO stage that the file names imply.
Status check_stage(const FileSet& set, Index part, const std::vector<RankStates>& ranks);

// Fails with kCorrupt unless numbers, such as the step, are equal on all ranks.
Status check_steps(FilePool& files, const std::vector<RankStates>& ranks);

// Joins the ranks' vectors of one kind to a tensor of the parameter, called `name`. `flat` returns a rank's vector, or
// null. The runs of unread ranks are not covered. Fails with kCorrupt if one is missing, too short or has another
// dtype.
Result<Tensor> join(const FlatParameter& parameter, const std::vector<RankStates>& ranks, std::string name,
                    const std::function<const StoredTensor*(const OptimizerStates&)>& flat);

}  // namespace reshard::deepspeed
