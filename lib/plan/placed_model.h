// A model as the ranks of a mesh hold it, described and not written down: a mesh, and for each tensor how it lies on
// it. A few hundred kilobytes for a model whose boxes would take hundreds of megabytes.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lib/checkpoint/catalog.h"
#include "lib/device/digest.h"
#include "lib/layout/layout.h"

namespace reshard {

struct PlacedTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  Placement placement;
};

struct PlacedModel {
  Mesh mesh;
  std::vector<PlacedTensor> tensors;
};

// The tensors of a catalog, wherever they lie now, as `place` puts them on a mesh (Placer, LayoutDescriptor::place).
Result<PlacedModel> place_model(const Catalog& model, const Mesh& mesh,
                                const std::function<Result<Placement>(const Tensor&)>& place);

// The same for equal models, whoever computes it: for ranks to find out that they were told different things.
Digest digest_of(const PlacedModel& model);

}  // namespace reshard
