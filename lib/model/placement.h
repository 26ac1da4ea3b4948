// SPDX-License-Identifier: Apache-2.0
// Places a model's tensors on a mesh.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lib/layout/layout.h"
#include "lib/layout/stages.h"
#include "lib/model/family.h"

namespace reshard {

// Chooses placements: tensor parallelism by the family's rules (without a family, along the dimension in which the
// source was cut), FSDP on dimension 0 of the rest, and pipeline stages by layer according to `stages`. Optimizer state
// is placed like its parameter.
class Placer {
 public:
  // A tensor to be placed, with a name of any convention. Refers to the caller's data.
  struct Of {
    const std::string& key;  // Tensor::key()
    const std::string& name;
    const Dims& shape;
    const FragmentList* fragments;  // how the source was cut; null: not at all. Only used without a family
    bool is_uncut = false;          // every rank holds all of it: part of a packed weight
  };
  static Of of(const Tensor& tensor) { return {tensor.key(), tensor.name, tensor.shape, &tensor.fragments}; }
  static std::vector<Of> of(const Catalog& catalog);

  // `family` and `config` must outlive the placer. `model` must have all tensors of the model. A usage error if there
  // are more pipeline stages than layers.
  static Result<Placer> make(const Mesh& mesh, const Family* family, const ModelConfig* config,
                             const std::vector<Of>& model, StageRule stages = StageRule::kTorchtitan);
  // Returns a sentence if tensor parallelism splits attention heads of a known config; usually empty.
  const std::string& warning() const { return warning_; }
  Placement place(const Of& tensor) const;

 private:
  Placer(const Mesh& mesh, const Family* family, const ModelConfig* config, StageRule stages)
      : mesh_(mesh), family_(family), config_(config), stages_(stages) {}
  Split tp_split(const Of& tensor, std::string_view parameter) const;
  Index stage(std::string_view parameter) const;

  Mesh mesh_;
  const Family* family_;
  const ModelConfig* config_;
  StageRule stages_;
  Index layers_ = 0;
  std::string warning_;
  std::unordered_map<std::string, Dims> parameter_shapes_;  // if there is optimizer state
};

}  // namespace reshard
