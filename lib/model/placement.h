// How a model's tensors lie on a mesh.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lib/layout/layout.h"
#include "lib/layout/stages.h"
#include "lib/model/family.h"

namespace reshard {

// How tensors are to lie on a mesh: tensor parallelism by the family's rules (without a family, along the dimension the
// source itself was cut), FSDP on dimension 0 of what is left, pipeline stages by layer as `stages` deals them out.
// Optimizer state follows its parameter.
class Placer {
 public:
  // A tensor that is to be placed, under the names of any convention. Refers to what it is of.
  struct Of {
    const std::string& key;  // Tensor::key()
    const std::string& name;
    const Dims& shape;
    const FragmentList* fragments;  // how the source was cut; null: in no way. Of no account where there is a family
    bool is_uncut = false;          // every rank holds all of it: part of a packed weight
  };
  static Of of(const Tensor& tensor) { return {tensor.key(), tensor.name, tensor.shape, &tensor.fragments}; }
  static std::vector<Of> of(const Catalog& catalog);

  // Refers to `family` and `config`. `model` is all of it. A usage error where there are more pipeline stages than
  // layers.
  static Result<Placer> make(const Mesh& mesh, const Family* family, const ModelConfig* config,
                             const std::vector<Of>& model, StageRule stages = StageRule::kTorchtitan);
  // A sentence on tensor parallelism that cuts through attention heads of a known config; mostly empty.
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
  std::unordered_map<std::string, Dims> parameter_shapes_;  // where there is state of an optimizer
};

}  // namespace reshard
