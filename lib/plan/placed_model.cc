#include "lib/plan/placed_model.h"

#include "lib/plan/mixer.h"

namespace reshard {
namespace {

void add(Mixer& mix, const Placement& placement) {
  mix.add(placement.stage);
  mix.add(static_cast<Index>(placement.splits.size()));
  for (const Split& split : placement.splits) {
    mix.add(split.dim);
    mix.add(split.groups);
    mix.add(static_cast<Index>(split.axes.size()));
    for (const std::string& axis : split.axes) mix.add(axis);
  }
}

}  // namespace

Result<PlacedModel> place_model(const Catalog& model, const Mesh& mesh,
                                const std::function<Result<Placement>(const Tensor&)>& place) {
  PlacedModel placed{mesh, {}};
  placed.tensors.reserve(model.tensors().size());
  for (const Tensor& tensor : model.tensors())
    placed.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, TRY(place(tensor))});
  return placed;
}

Digest digest_of(const PlacedModel& model) {
  Mixer mix;
  mix.add(static_cast<Index>(model.mesh.axes().size()));
  for (const MeshAxis& axis : model.mesh.axes()) {
    mix.add(axis.name);
    mix.add(axis.size);
  }
  for (const PlacedTensor& tensor : model.tensors) {
    mix.add(tensor.name);
    mix.add(static_cast<Index>(tensor.dtype));
    mix.add(tensor.shape);
    add(mix, tensor.placement);
  }
  return mix.digest();
}

}  // namespace reshard
