// The parameters that a model has by its config, as its family describes them.
#pragma once

#include <string>
#include <vector>

#include "lib/model/config.h"
#include "lib/model/family.h"

namespace reshard {

// The shape that a rule's parameters have. Fails where the config lacks a number that it needs.
Result<Dims> expected_shape(const NameRule& rule, const ModelConfig& config);

// A parameter that a model has by its config.
struct Parameter {
  std::string name;  // canonical
  Dims shape;
  const NameRule* rule = nullptr;
  Index layer = -1;
  Index expert = -1;
  bool is_tied = false;   // shares its bytes with another, and need not be stored
  bool is_scale = false;  // holds the scales of a quantized one, whose the rule is
  std::string dtype;      // "bfloat16": the rule's, a quantized model's, or the config's; may be empty
  Dims values = {};       // the shape of what it holds, where an element packs several; else empty
  const Dims& value_shape() const { return values.rank() > 0 ? values : shape; }
};
// All of them, layer by layer within each rule; an FP8 model's scales follow their matrices. Fails where the config
// lacks a number that a shape needs, and for models quantized in a way that is not known.
Result<std::vector<Parameter>> parameters(const Family& family, const ModelConfig& config);
// What a checkpoint may hold besides: the layers that predict further tokens, and the scales of matrices that the
// producer may have made float8. Mostly empty.
Result<std::vector<Parameter>> optional_parameters(const Family& family, const ModelConfig& config);
// Their elements, tied ones counted once and scales not at all: what people mean by a model's size.
Index count_elements(const std::vector<Parameter>& parameters);

}  // namespace reshard
