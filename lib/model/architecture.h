// SPDX-License-Identifier: Apache-2.0
// Classes of models as transformers has them: the names of their parameters, and their shapes as formulas over
// config.json. Made by samples/families/generate.py, which builds every class at many configs without its weights, and
// compiled in (samples/families/architectures.jsonl). A family (family.h) knows more of a model and comes first.
//
// The file has one line of JSON for each model_type:
//
//   {"type":"bert", "prefix": "bert.", "transformers": "5.24.0",
//    "classes": ["BertModel", "BertForMaskedLM"], "bare": [0],   those whose names have no prefix
//    "defaults": {"vocab_size": 30522},                   of members that a config may leave out
//    "computed": {"head_dim": "hidden_size/num_heads"},   of numbers that a config without them computes; "?": unknown
//    "fixed": {"norm": "group"},                          members for which only this value was tried
//    "texts": ["hidden_size", "hidden_size,intermediate_size", "num_layers"],
//    "base": [{"in": [0, 1], "rows": "..."}, ...],        rows of these classes, after the prefix or without it
//    "own": [{"in": [1], "rows": "..."}, ...]}            rows of these classes that have no prefix
//
// Rows are separated by spaces, their columns by "|": NAME|DIMENSIONS|COUNTS|CONDITION. The last three are numbers of
// texts, or empty; empty columns at the end are left out. A name begins with a digit: the number of components that it
// shares with the name before. Then may follow a mark: "<" for names only in files, ">" for names only in memory, "~"
// for names in memory of what another name stands for in files.
//
//   0encoder.layer.{}.output.dense.bias|0|2 5weight|1|2
//
// Each {} of a name is a number below the count of its place. Dimensions and counts are formulas (formula.h); a
// dimension "?" may have any size. Of alternatives "a;b" the first counts whose members are all given. Members of parts
// are paths, "vision_config.hidden_size"; elements of lists too, "depths.0", and "id2label.#" is the length of a list
// or an object. "layer_types[#]" is the element for the number of the first {}.
//
// The condition says when the parameter is there: alternatives of ";" of terms joined by "&", each possibly negated by
// "!". "?": it may be missing.
//
//   tie_word_embeddings     the member is not 0, false or null
//   norm='group'            text             num_heads=8  a<b   numbers: formulas on the right
//   #=0   #<first_dense     the number of the first {}          #@layers   it is in that list
//   #%interval=1            the rest of a division
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

// Where a name stands.
enum class StandsIn {
  kEverywhere,
  kFiles,
  kMemory,
  kMemoryTied,  // for what another name stands for in files
};

struct ArchitectureRow {
  std::string name;                 // without the prefix: "encoder.layer.{}.output.dense.weight"
  std::vector<std::string> dims;    // formulas
  std::vector<std::string> counts;  // formulas, one for each {}
  std::string condition;
  bool is_base = false;  // its name may begin with the prefix
  StandsIn stands_in = StandsIn::kEverywhere;
};

struct Architecture {
  std::string transformers;     // "5.24.0"
  std::string name;             // of the class: "BertForMaskedLM"
  std::string prefix;           // "bert."; may be empty
  bool has_prefix = false;      // in what transformers saves of the class
  bool is_other_class = false;  // the class is unknown: another one of the type, of which nothing must be there
  std::vector<ArchitectureRow> rows;
  Json defaults, computed, fixed;  // objects, by members of the config: "text_config.hidden_size"
};

// Reads the class of a model_type. If the class is unknown, the rows that its type's classes share. Nothing if the type
// is unknown.
std::optional<Architecture> find_architecture(std::string_view model_type, std::string_view name);

inline constexpr Index kAnySize = -1;  // of a dimension for which no formula was found

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

// Lists the parameters of the model that a config describes, each name once. Fails if the config has another value than
// those that were tried for a member, or describes more parameters than any model has.
Result<ArchitectureModel> parameters_of(const Architecture& architecture, const Json& config);

// Returns the table as text, with one line per model_type, in order.
std::string_view builtin_architectures();

}  // namespace reshard
