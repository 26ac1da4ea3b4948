// SPDX-License-Identifier: Apache-2.0
// Compares a checkpoint's tensors with the parameters of transformers' class of the model (lib/model/architecture.h).
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/model/config.h"

namespace reshard {

// A tensor of a model, under its plain key.
struct NamedTensor {
  const Tensor* tensor = nullptr;
  std::string name;
};

struct ArchitectureAudit {
  std::vector<Finding> findings;
  std::string skipped;   // why nothing was compared; empty if it was, or if the class is unknown
  std::string compared;  // "BertModel of transformers 5.24.0, 103 tensors, 22,713,216 parameters"; empty: nothing was
  Index unknown = 0;     // tensors whose names the class does not have
  std::set<const Tensor*> proven;  // tensors that have the shape that the class's formulas give in all dimensions

  // Returns whether the class describes all tensors, and requires no further ones.
  bool is_whole() const { return !compared.empty() && unknown == 0 && findings.empty(); }
};

// `contradicted` are fields of the config that were already reported; consequences of them are not reported again.
// `others` are names that also count as tensors, such as those of packed weights.
ArchitectureAudit audit_architecture(const std::vector<NamedTensor>& tensors, const std::set<std::string>& others,
                                     const ModelConfig& config, const std::set<std::string>& contradicted);

}  // namespace reshard
