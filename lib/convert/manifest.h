// SPDX-License-Identifier: Apache-2.0
// reshard_manifest.json, which is written next to every output: what was done, and a digest of each tensor.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/convert/conversion.h"

namespace reshard {

// Passes the manifest's text to `emit` in parts, since that of a large model takes tens of megabytes. `proofs` are
// those of the plan's tensors; `sources` are the digests of each source of a merge, null if it is not a merge.
void write_manifest(const Conversion& conversion, const std::vector<TensorProof>& proofs, const MergeDigests* sources,
                    const std::function<void(std::string_view part)>& emit);

// Returns the manifest's text.
std::string manifest(const Conversion& conversion, const std::vector<TensorProof>& proofs,
                     const MergeDigests* sources = nullptr);

// What is known of a manifest before the digests are.
struct ManifestOutline {
  Index length = 0;  // bytes
  std::string head;  // the text before the first tensor; empty if there is none
};
ManifestOutline outline_manifest(const Conversion& conversion);

}  // namespace reshard
