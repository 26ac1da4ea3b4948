// SPDX-License-Identifier: Apache-2.0
// Checks a checkpoint's boxes and their writers against the mesh and placements that a run declared, and explains the
// differences.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/infer/mesh_inference.h"
#include "lib/layout/layout.h"

namespace reshard {

struct DeclaredLayout {
  std::string title;  // for people: "dp_replicate=2, dp_shard=8"
  Mesh mesh;
  // Returns the declared placement of a tensor. An error means that the layout does not cover it.
  std::function<Result<Placement>(const Tensor& tensor)> place;
  bool stages_are_exact = false;  // whether the stage of each layer is declared, not only the number of stages
  bool stored_whole = false;      // whether files hold gathered tensors, so that the mesh leaves no trace in them
};

struct MeshAudit {
  std::vector<Finding> findings;
  Index tensors = 0;  // whose boxes were compared
  Index pieces = 0;
  Index not_placed = 0;           // tensors that the layout does not cover
  Index flat = 0;                 // tensors of optimizer state that are runs of elements, like FSDP1's flat parameters
  bool writers_compared = false;  // whether file names tell which rank wrote them
  std::string ranks_skipped;      // why neither stages nor writers could be compared; empty: they were
  // Names of the tensors that lack pieces only because ranks wrote nothing ("ranks-silent").
  std::vector<std::string> lacking;
};

// `observed` must be the result of infer_mesh() for the same catalog.
MeshAudit audit_mesh(const Catalog& catalog, const DeclaredLayout& declared, const InferredMesh& observed);

}  // namespace reshard
