// SPDX-License-Identifier: Apache-2.0
// Classes of models as transformers has them: the names of their parameters, and their shapes as formulas over
// config.json. Made by samples/families/generate.py, which builds every class at many configs without its weights, and
// compiled in (samples/families/architectures.jsonl). A family (family.h) knows more of a model and comes first.
//
// The file has one line of JSON for each model_type:
//
//   {"type": "bert", "prefix": "bert.", "transformers": "5.24.0",
//    "classes": ["BertModel", "BertForMaskedLM"],
//    "defaults": {"vocab_size": 30522},                    of numbers that a config may leave out
//    "fixed": {"feat_extract_norm": "group"},              members for which only this value was tried
//    "base": [{"in": [0, 1], "rows": [...]}, ...],         rows of these classes, after the prefix or without it
//    "own": [{"in": [1], "rows": [...]}, ...]}             rows of these classes that have no prefix
//
// A dimension "?" may have any size. A row is "NAME|DIMENSIONS|COUNTS|CONDITION":
// "encoder.layer.{}.output.dense.weight|hidden_size,intermediate_size| num_hidden_layers|". Each {} of the name is a
// number below the count of its place. The condition is empty, a member that must not be 0, "!" and a member that must
// be 0, or "?": the parameter may be missing.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/result.h"
#include "lib/layout/box.h"

namespace reshard {

struct ArchitectureRow {
  std::string name;                 // without the prefix: "encoder.layer.{}.output.dense.weight"
  std::vector<std::string> dims;    // formulas
  std::vector<std::string> counts;  // formulas, one for each {}
  std::string condition;
  bool is_base = false;  // its stored name may begin with the prefix
};

struct Architecture {
  std::string transformers;  // "5.24.0"
  std::string name;          // of the class: "BertForMaskedLM"
  std::string prefix;        // "bert."; may be empty
  std::vector<ArchitectureRow> rows;
  Json defaults, fixed;  // objects, by members of the config: "text_config.hidden_size"
};

// Reads the class of a model_type. Nothing if the type or the class is unknown.
std::optional<Architecture> find_architecture(std::string_view model_type, std::string_view name);

// Returns the member of a config at a path such as "text_config.hidden_size"; null if there is none.
const Json* member_at(const Json& config, std::string_view path);

inline constexpr Index kAnySize = -1;  // size of a dimension without a formula

// A parameter of the architecture, which may be optional.
struct ArchitectureParameter {
  std::string name;  // without the prefix
  Dims shape;
  const ArchitectureRow* row = nullptr;
  bool is_required = false;
};

struct ArchitectureModel {
  std::vector<ArchitectureParameter> parameters;
  Index not_derived = 0;  // rows whose formulas need a number that the config lacks
};

// Lists the parameters of the model that a config describes. Fails if a member has another value than the only one that
// was tried, or if there are more parameters than any model has.
Result<ArchitectureModel> parameters_of(const Architecture& architecture, const Json& config);

// Returns the table as text, with one line per model_type, in order.
std::string_view builtin_architectures();

}  // namespace reshard
