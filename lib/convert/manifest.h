// What lies beside every output: reshard_manifest.json, with what was done and a digest of each tensor.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/convert/conversion.h"

namespace reshard {

// Gives out its text in parts: of a large model it is tens of megabytes. `proofs` are of the plan's tensors; `sources`
// what was read of each source of a merge, null where it is none.
void write_manifest(const Conversion& conversion, const std::vector<TensorProof>& proofs, const MergeDigests* sources,
                    const std::function<void(std::string_view part)>& emit);

// All of it.
std::string manifest(const Conversion& conversion, const std::vector<TensorProof>& proofs,
                     const MergeDigests* sources = nullptr);

// How long it is, whatever the digests; of a conversion that merges nothing.
Index manifest_length(const Conversion& conversion);

}  // namespace reshard
