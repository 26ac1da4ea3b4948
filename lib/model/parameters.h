// SPDX-License-Identifier: Apache-2.0
// Lists the parameters of the model that a config describes, according to its family.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/model/config.h"
#include "lib/model/family.h"

namespace reshard {

// Returns the shape of a rule's parameters in a layer (-1: outside the layers). Fails if the config lacks a number that
// the shape needs.
Result<Dims> expected_shape(const NameRule& rule, const ModelConfig& config, Index layer);

// A parameter that the config's model has.
struct Parameter {
  std::string name;  // canonical
  Dims shape;
  const NameRule* rule = nullptr;
  Index layer = -1;
  Index expert = -1;
  bool is_tied = false;        // shares its bytes with another parameter and need not be stored
  bool has_own_dtype = false;  // keeps its dtype when the model is loaded in another one (kept_dtypes.h)
  bool is_scale = false;       // the scales of a quantized parameter; `rule` is that parameter's
  std::string dtype;           // "bfloat16": from the rule, the quantization or the config; may be empty
  Dims values = {};            // shape of the values if an element packs several, otherwise empty
  const Dims& value_shape() const { return values.rank() > 0 ? values : shape; }
};
// Returns the rules whose parameters the model must have: not tied ones, replaced heads, or layers that predict further
// tokens. Without a config: those that every model of the family has.
std::vector<const NameRule*> required_rules(const Family& family, const ModelConfig* config);
// Returns all parameters, layer by layer within each rule; an FP8 model's scales follow their matrices. Fails if the
// config lacks a number that a shape needs, or the quantization is unknown.
Result<std::vector<Parameter>> parameters(const Family& family, const ModelConfig& config);
// Returns parameters that a checkpoint may additionally have: layers that predict further tokens, the head of a model
// that has_other_head(), and the scales of matrices that the producer may have made float8. Usually empty.
Result<std::vector<Parameter>> optional_parameters(const Family& family, const ModelConfig& config);
// has_other_head() returns whether the config's class replaces the language model's head by its own (a classifier:
// "LlamaForSequenceClassification"); is_headless(), whether it has no head ("LlamaModel").
bool has_other_head(const ModelConfig& config);
bool is_headless(const ModelConfig& config);
// Returns whether a parameter belongs to such a replacement head: "score.weight".
bool is_other_head(std::string_view parameter);
// Returns the number of elements, with tied parameters counted once and scales not at all: what people call a model's
// size.
Index count_elements(const std::vector<Parameter>& parameters);

}  // namespace reshard
