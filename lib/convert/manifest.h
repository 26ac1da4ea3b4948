// What lies beside every output: reshard_manifest.json, with what was done and a digest of each tensor.
#pragma once

#include <string>
#include <vector>

#include "lib/convert/conversion.h"

namespace reshard {

// `proofs` are of the plan's tensors; `sources` what was read of each source of a merge, null where it is none.
std::string manifest(const Conversion& conversion, const std::vector<TensorProof>& proofs,
                     const MergeDigests* sources = nullptr);

// How long it is, whatever the digests; of a conversion that merges nothing.
Index manifest_length(const Conversion& conversion);

}  // namespace reshard
