// What reshard recorded of a checkpoint when it wrote it, held against what a conversion has read of it.
#pragma once

#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/engine/run.h"
#include "lib/model/model.h"
#include "lib/plan/plan.h"

namespace reshard {

// What was read: the tensors of `plan` in `view`, and a proof of each.
struct ReadTensors {
  const Plan& plan;
  const Catalog& view;
  const std::vector<TensorProof>& proofs;
};

// Compares digests with those in the source's reshard_manifest.json; how many there were. Tensors that checksums guard
// are left alone, and so are files whose length is not the recorded one: they were written by another program since.
// What is recorded in another order of elements is read once more. Corrupt, naming the tensor, where one differs. Of
// several ranks each calls it.
Result<Index> check_source_manifest(Reader& source, const Model& model, const ReadTensors& read,
                                    const RunOptions& options);

}  // namespace reshard
