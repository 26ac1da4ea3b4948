// The layout descriptors a checkpoint implies: infer_mesh told how its tensors lie, this writes it down, tensor names
// folded into patterns, with the evidence for each line.
#pragma once

#include <string>
#include <vector>

#include "lib/infer/mesh_inference.h"
#include "lib/layout/descriptor.h"

namespace reshard {

// One descriptor for each hypothesis of `inferred`, in its order; one of whole tensors on one rank where it has none.
// Reading one back and placing the catalog's tensors gives each rank the boxes it wrote (docs/layout.md says what is
// left out: tensors that lie as no mesh would have it, named in the notes). Evidence stands for each axis of the mesh
// ("tp=4"), each rule ("tensors[2]") and the vocabulary. Unsupported when a name is no UTF-8 or the names do not fold
// into as many patterns as a descriptor may have.
Result<std::vector<LayoutDescriptor>> infer_layouts(const Catalog& catalog, const InferredMesh& inferred,
                                                    const std::string& name);

}  // namespace reshard
