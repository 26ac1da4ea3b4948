// The parameters that a model has by its config, as its family describes them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/model/config.h"
#include "lib/model/family.h"

namespace reshard {

// The shape that a rule's parameters have in a layer (-1: outside of the layers). Fails where the config lacks a number
// that it needs.
Result<Dims> expected_shape(const NameRule& rule, const ModelConfig& config, Index layer);

// A parameter that a model has by its config.
struct Parameter {
  std::string name;  // canonical
  Dims shape;
  const NameRule* rule = nullptr;
  Index layer = -1;
  Index expert = -1;
  bool is_tied = false;        // shares its bytes with another, and need not be stored
  bool has_own_dtype = false;  // stays in it when the model is loaded in another one (kept_dtypes.h)
  bool is_scale = false;       // holds the scales of a quantized one, whose the rule is
  std::string dtype;           // "bfloat16": the rule's, a quantized model's, or the config's; may be empty
  Dims values = {};            // the shape of what it holds, where an element packs several; else empty
  const Dims& value_shape() const { return values.rank() > 0 ? values : shape; }
};
// The rules of which a model has parameters, but for those that may be missing: tied ones, other heads, layers that
// predict further tokens. Without a config: those that every model of the family has.
std::vector<const NameRule*> required_rules(const Family& family, const ModelConfig* config);
// All of them, layer by layer within each rule; an FP8 model's scales follow their matrices. Fails where the config
// lacks a number that a shape needs, and for models quantized in a way that is not known.
Result<std::vector<Parameter>> parameters(const Family& family, const ModelConfig& config);
// What a checkpoint may hold besides: the layers that predict further tokens, the head of a model that
// has_other_head(), and the scales of matrices that the producer may have made float8. Mostly empty.
Result<std::vector<Parameter>> optional_parameters(const Family& family, const ModelConfig& config);
// Whether config.json says by its class that the language model's head is not the model's: a classifier has one of its
// own ("LlamaForSequenceClassification"), "LlamaModel" none.
bool has_other_head(const ModelConfig& config);
bool is_headless(const ModelConfig& config);
// Whether a parameter is of the head that such a model has instead: "score.weight".
bool is_other_head(std::string_view parameter);
// Their elements, tied ones counted once and scales not at all: what people mean by a model's size.
Index count_elements(const std::vector<Parameter>& parameters);

}  // namespace reshard
