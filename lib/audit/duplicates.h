// Weights that are stored twice: matrices of equal values under names that nothing declares to be one.
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/device/digest.h"
#include "lib/engine/run.h"
#include "lib/model/model.h"

namespace reshard {

// digests[i] belongs to view.tensors()[i]; the tensors are located, and `files` is their reader's pool: those that are
// alike are read once more, to tell weights from matrices of one value. Findings "weights-twice": a warning, and a note
// where the names differ in the numbers of layers or experts alone. Of a model of no known family, whose tied weights
// are not known, only a name that is another one with something before it counts.
Result<std::vector<Finding>> audit_duplicates(const Catalog& view, const std::vector<Digest>& digests,
                                              const Model& model, FilePool& files, const RunOptions& options);

}  // namespace reshard
