// Which parameters stay in float32 when transformers loads a model in a narrower dtype: gates of routers and their
// correction biases, norms of some models. What it loads so, it saves so.
//
// The table is transformers' own, of every model type that it has (samples/families/kept_float32.json, which
// samples/families/generate.py makes):
//
//   always    PreTrainedModel._keep_in_fp32_modules_strict, and parameters that a model makes in float32 itself
//   float16   PreTrainedModel._keep_in_fp32_modules: only where the model is loaded in float16, whose range is small
#pragma once

#include <optional>
#include <string_view>

#include "lib/layout/dtype.h"
#include "lib/model/family.h"

namespace reshard {

// Returns the dtype of a parameter in a model that is loaded as `as`, where that is another one: the family's own word
// (NameRule::dtype), or float32 as in the table. `parameter` is a plain key (parts.h). `family` and `config` may be
// null: the model types are the config's and its parts', without one the family's. Thread-safe.
std::optional<DType> kept_dtype(const Family* family, const ModelConfig* config, std::string_view parameter, DType as);
// The same of all parameters of a rule, which is the family's.
std::optional<DType> kept_dtype(const Family& family, const ModelConfig* config, const NameRule& rule, DType as);

// Whether the table says of the config's model type what stays in float32, even if that is nothing.
bool knows_kept_dtypes(const ModelConfig& config);
// "5.24.0": of the transformers that the table is from.
std::string_view kept_dtypes_version();

}  // namespace reshard
