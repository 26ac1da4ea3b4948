// SPDX-License-Identifier: Apache-2.0
// Compares the tensors of a model that no family describes with its config.json: with the numbers that mean the same in
// every model (words, width, layers, experts, heads, positions), and with transformers' class of the model, if it is
// known (architecture_audit.h). Uses metadata only.
#pragma once

#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/model/config.h"

namespace reshard {

// A kind of number that a config contains once or several times: "layers" in num_hidden_layers and
// encoder.num_hidden_layers.
struct CheckedNumber {
  std::string check;  // the check of which it is part (CheckRun::id): "vocabulary", "shape", "missing"
  std::string field;  // "num_hidden_layers"
};

struct UnknownModelAudit {
  std::vector<Finding> findings;        // with a family's ids and severities
  std::vector<CheckedNumber> compared;  // those that the tensors confirm or contradict

  std::string architecture;  // ArchitectureAudit::compared; empty: the class is unknown
  std::string skipped;       // ArchitectureAudit::skipped
  Index unknown = 0;         // tensors that the known class does not have

  // Returns whether one of the check's numbers was compared, or the tensors were compared with a known class.
  bool has_compared(std::string_view check) const;
};

// Reports a contradiction only if one of the config's numbers has no tensor, and a tensor in its role has a size that
// no other number of the config explains. A number that the model does not use is therefore no contradiction.
UnknownModelAudit audit_unknown_model(const Catalog& catalog, const ModelConfig& config);

// Returns a line that lists what was and was not compared: "config.json: checked vocab_size and hidden_size; not
// checked: other names and shapes, as no family describes model_type 'bert'".
std::string summary(const UnknownModelAudit& audit, const ModelConfig& config);

}  // namespace reshard
