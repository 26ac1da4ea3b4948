// SPDX-License-Identifier: Apache-2.0
// Writes the layout descriptors that a checkpoint implies, from the result of infer_mesh(): tensor names folded into
// patterns, with the evidence for each line.
#pragma once

#include <string>
#include <vector>

#include "lib/infer/mesh_inference.h"
#include "lib/layout/descriptor.h"

namespace reshard {

// Returns one descriptor for each hypothesis of `inferred`, in its order, or one of whole tensors on one rank if there
// is none. Reading a descriptor back and placing the catalog's tensors gives each rank the boxes it wrote; tensors that
// no mesh explains are left out and named in the notes (docs/layout.md). Evidence is given for each axis of the mesh
// ("tp=4"), each rule ("tensors[2]") and the vocabulary. Unsupported if a name is not UTF-8 or the names do not fold
// into as many patterns as a descriptor may have.
Result<std::vector<LayoutDescriptor>> infer_layouts(const Catalog& catalog, const InferredMesh& inferred,
                                                    const std::string& name);

}  // namespace reshard
