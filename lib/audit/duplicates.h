// SPDX-License-Identifier: Apache-2.0
// Finds weights that are stored twice: matrices of equal values under names that are not declared to be tied.
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/device/digest.h"
#include "lib/engine/run.h"
#include "lib/model/model.h"

namespace reshard {

// digests[i] belongs to view.tensors()[i]. The tensors must be located, and `files` must be their reader's pool:
// candidates are read again, to distinguish weights from constant matrices. Findings "weights-twice": a warning, or a
// note if the names differ only in the numbers of layers or experts. In a model of no known family, whose tied weights
// are unknown, a name only counts as a copy if it is the other one with a prefix.
Result<std::vector<Finding>> audit_duplicates(const Catalog& view, const std::vector<Digest>& digests,
                                              const Model& model, FilePool& files, const RunOptions& options);

}  // namespace reshard
