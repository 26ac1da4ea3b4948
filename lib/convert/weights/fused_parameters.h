// SPDX-License-Identifier: Apache-2.0
// Parameters that transformers holds fused in memory and files hold in parts, such as the matrices of all experts. PEFT
// trains an adapter of such a parameter under the name of its module (LoraConfig.target_parameters).
//
//   model.layers.0.mlp.experts.gate_up_proj [E, 2F, H]   from ...experts.{0..E}.{gate,up}_proj.weight [F, H]
//   model.layers.0.mlp.experts.down_proj    [E, H, F]    from ...experts.{0..E}.down_proj.weight      [H, F]
#pragma once

#include <string>
#include <vector>

#include "lib/checkpoint/catalog.h"
#include "lib/model/model.h"

namespace reshard {

// A weight of the view, and its position in the fused parameter.
struct FusedPart {
  std::size_t weight = 0;   // in the view
  Index expert = -1;        // -1: the weight has all experts
  Index first_row = 0;      // row of the expert's matrix at which the weight begins: gate and up are sections of one
  bool transposed = false;  // whether the last two dimensions are then swapped
};

struct FusedParameter {
  std::string module, name;  // "model.layers.0.mlp.experts", "down_proj"
  Dims shape;                // in memory: experts, rows, columns
  bool input_first = false;  // rows are the layer's inputs (transformers' is_transposed)
  std::vector<FusedPart> parts;

  Index experts() const { return shape[0]; }
  std::string full_name() const { return module + "." + name; }
};

// Returns the fused parameters of a canonical view, those of a family in the order in which transformers defines them.
// Unsupported if parts of one are missing.
Result<std::vector<FusedParameter>> fused_parameters(const Catalog& view, const Model& model);

}  // namespace reshard
