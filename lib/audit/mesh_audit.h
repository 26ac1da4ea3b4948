// Holds a checkpoint's boxes, and who wrote them, against the mesh and the placements that a run declared; explains
// what it finds instead.
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
  // How a tensor is to lie. An error means that the layout says nothing of it.
  std::function<Result<Placement>(const Tensor& tensor)> place;
  bool stages_are_exact = false;  // whether the stage of each layer is declared too, or only how many there are
  bool stored_whole = false;      // whether files hold gathered tensors: then the mesh leaves no trace in them
};

struct MeshAudit {
  std::vector<Finding> findings;
  Index tensors = 0;  // whose boxes were compared
  Index pieces = 0;
  Index not_placed = 0;  // tensors of which the layout says nothing
  Index flat = 0;        // tensors of optimizer state that are runs of elements, as FSDP1's flat parameters are
  bool writers_compared = false;  // whether file names tell who wrote what
  std::string ranks_skipped;      // why neither stages nor writers could be compared; empty: they were
  // Names of the tensors that lack the pieces of ranks which wrote nothing ("ranks-silent"), and no others.
  std::vector<std::string> lacking;
};

// `observed` is what infer_mesh says of the same catalog.
MeshAudit audit_mesh(const Catalog& catalog, const DeclaredLayout& declared, const InferredMesh& observed);

}  // namespace reshard
