// SPDX-License-Identifier: Apache-2.0
// Model classes of transformers: the names of their parameters, and their shapes as formulas over config.json.
// samples/families/generate.py derives them by building every class with many configs, without weights; the result is
// compiled in, compressed (samples/families/architectures.jsonl). `reshard family` makes a line for a class of the
// user's own. A family (family.h) knows more about a model and takes precedence.
//
// The file has one line of JSON for each model_type:
//
//   {"type": "bert", "prefix": "bert.", "transformers": "5.24.0",
//    "classes": ["BertModel", "BertForMaskedLM"],
//    "bare": [0],                                           classes whose names have no prefix
//    "defaults": {"vocab_size": 30522},                     values of members that a config may leave out
//    "computed": {"head_dim": "hidden_size/num_heads"},     numbers that are computed if the config lacks them; "?":
//                                                           unknown
//    "fixed": {"norm": "group"},                            members that were tried with this value only
//    "texts": ["hidden_size", "hidden_size,intermediate_size", "num_layers"],
//    "base": [{"in": [0, 1], "rows": "..."}, ...],          rows whose names may begin with the prefix
//    "own": [{"in": [1], "rows": "..."}, ...]}              rows whose names do not
//
// Rows are separated by spaces, their columns by "|": NAME|DIMENSIONS|COUNTS|CONDITION. The last three are indices into
// "texts", or empty; empty columns at the end are left out. A name begins with a digit, the number of components that
// it shares with the previous name. A mark may follow: "<" for a name that is only in files, ">" for one that is only
// in memory, "~" for one in memory whose parameter has another name in files.
//
//   0encoder.layer.{}.output.dense.bias|0|2 5weight|1|2
//
// Each {} of a name is a number below the count at its position. Dimensions and counts are formulas (formula.h); a
// dimension "?" may have any size. Of alternatives "a;b" the first one whose members all exist is used. Members of
// parts and elements of lists are paths: "vision_config.hidden_size", "depths.0". "id2label.#" is the length of a list
// or an object, and "layer_types[#]" the element whose index is the number in the first {}.
//
// The condition says when the parameter exists: alternatives separated by ";", each of terms joined by "&" and possibly
// negated by "!". With "?" the parameter is optional.
//
//   tie_word_embeddings     the member is not 0, false or null
//   norm='group'            text             num_heads=8  a<b   numbers: formulas on the right
//   #=0   #<first_dense     the number of the first {}          #@layers   it is in the list
//   #%interval=1            the remainder of a division
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/result.h"
#include "lib/layout/box.h"
#include "lib/model/families.h"

namespace reshard {

// Where a name occurs.
enum class NameScope {
  kEverywhere,
  kFiles,
  kMemory,
  kMemoryTied,  // in memory; in files the parameter has another name
};

struct ArchitectureRow {
  std::string name;                 // without the prefix: "encoder.layer.{}.output.dense.weight"
  std::vector<std::string> dims;    // formulas
  std::vector<std::string> counts;  // formulas, one for each {}
  std::string condition;
  bool is_base = false;  // its name may begin with the prefix
  NameScope stands_in = NameScope::kEverywhere;
};

struct Architecture {
  std::string transformers;     // "5.24.0"
  std::string name;             // the class: "BertForMaskedLM"
  std::string prefix;           // "bert."; may be empty
  bool has_prefix = false;      // whether names in saved files begin with it
  bool is_other_class = false;  // the class is unknown: rows of the type's other classes, none of them required
  std::vector<ArchitectureRow> rows;
  Json defaults, computed, fixed;  // objects, by members of the config: "text_config.hidden_size"
};

// Reads the class `name` of a model_type, from the user's table if `families` has one of this type, otherwise from the
// built-in table. If the class is unknown, returns the rows that the type's classes share; nothing if the type is
// unknown.
std::optional<Architecture> find_architecture(std::string_view model_type, std::string_view name,
                                              Families families = {});

// Returns the model_type of a table of the user's own, one line as above. Fails if it is malformed. `path` names the
// table in errors.
Result<std::string> type_of_class_table(std::string_view text, std::string_view path);

inline constexpr Index kAnySize = -1;  // a dimension for which no formula was found

// A parameter of the architecture, which may be optional.
struct ArchitectureParameter {
  std::string name;  // without the prefix
  Dims shape;
  const ArchitectureRow* row = nullptr;
  bool is_required = false;

  bool fits(const Dims& stored) const;  // kAnySize is any size
};

struct ArchitectureModel {
  std::vector<ArchitectureParameter> parameters;
  Index not_derived = 0;  // rows whose formulas need a number that the config lacks
};

// Lists the parameters of the model that a config describes, each name once. Fails if a member of the config has a
// value that was not tried, or if the config describes more parameters than any model has.
Result<ArchitectureModel> parameters_of(const Architecture& architecture, const Json& config);

// Returns the built-in table as text, with one line per model_type, in order. Decoded at the first call. Thread-safe.
std::string_view builtin_architectures();

// A zstd frame, and the size of the text in it.
struct CompressedText {
  std::string_view frame;
  std::size_t size = 0;
};
CompressedText compressed_architectures();

}  // namespace reshard
