// Models as they would lie on many ranks, for programs that plan with them: nothing is stored anywhere.
#pragma once

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "lib/model/placement.h"
#include "lib/plan/placed_model.h"

namespace reshard {

// The tensors of a Llama config's model in bf16. With its optimizer, under mixed precision: in float32 a master copy
// and Adam's two moments of each as well, 14 bytes a parameter.
inline Result<Catalog> model_of(const std::string& config_path, bool with_optimizer) {
  std::ostringstream text;
  text << std::ifstream(config_path).rdbuf();
  const ModelConfig config = TRY(ModelConfig::parse(TRY(parse_json(text.str(), config_path)), config_path));
  Catalog catalog;
  const auto add = [&](std::string name, DType dtype, const Dims& shape) {
    Tensor tensor;
    tensor.name = std::move(name);
    tensor.dtype = dtype;
    tensor.shape = shape;
    return catalog.add(std::move(tensor));
  };
  for (const Parameter& p : TRY(parameters(*find_family("llama"), config))) {
    TRY(add(p.name, DType::kBFloat16, p.shape));
    if (!with_optimizer) continue;
    for (const char* state : {".exp_avg", ".exp_avg_sq", ".master"})
      TRY(add("optimizer.state." + p.name + state, DType::kFloat32, p.shape));
  }
  return catalog;
}

// The model on a mesh, as the family's rules and torchtitan's stages put it there.
inline Result<PlacedModel> placed(const Catalog& model, const std::string& mesh_text) {
  const Mesh mesh = TRY(Mesh::parse(mesh_text));
  const Placer placer = TRY(Placer::make(mesh, find_family("llama"), nullptr, model));
  return place_model(model, mesh, [&](const Tensor& t) -> Result<Placement> { return placer.place(t); });
}

// What a checkpoint of it records: a file a rank, and what the rank holds one after the other in it.
inline Result<Catalog> recorded(const PlacedModel& model) {
  Catalog out;
  out.files.resize(static_cast<std::size_t>(model.mesh.ranks()));
  std::vector<Index> ends(out.files.size());
  for (const PlacedTensor& t : model.tensors) {
    Tensor tensor;
    tensor.name = t.name;
    tensor.dtype = t.dtype;
    tensor.shape = t.shape;
    tensor.fragments = tensor.replicas = FragmentList(t.shape.rank());
    for (Index rank = 0; rank < model.mesh.ranks(); ++rank) {
      const bool is_first = is_first_replica(model.mesh, t.placement, rank);
      Index& end = ends[static_cast<std::size_t>(rank)];
      for (const LocalBox& piece : owned_boxes(model.mesh, t.placement, t.shape, rank)) {
        const Index bytes = volume(piece.box) * byte_size(t.dtype);
        (is_first ? tensor.fragments : tensor.replicas).add(piece.box, {static_cast<std::uint32_t>(rank), end, bytes});
        end += bytes;
      }
    }
    TRY(out.add(std::move(tensor)));
  }
  return out;
}

}  // namespace reshard
