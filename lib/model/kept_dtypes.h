// SPDX-License-Identifier: Apache-2.0
// Which parameters stay float32 when transformers loads a model in a narrower dtype: the gates of routers and their
// correction biases, the norms of some models. Saved files have the same dtypes.
//
// The table is extracted from transformers for all of its model types (samples/families/kept_float32.json, made by
// samples/families/generate.py):
//
//   always    PreTrainedModel._keep_in_fp32_modules_strict, and parameters that the model's code creates in float32
//   float16   PreTrainedModel._keep_in_fp32_modules: only if the model is loaded in float16, because of its small range
#pragma once

#include <optional>
#include <string_view>

#include "lib/layout/dtype.h"
#include "lib/model/family.h"

namespace reshard {

// Returns the dtype of a parameter in a model loaded as `as`, if it differs from `as`: what the family says
// (NameRule::dtype), or float32 according to the table. `parameter` is a plain key (parts.h). `family` and `config` may
// be null. The model types are those of the config and its parts or, without a config, the family's. Thread-safe.
std::optional<DType> kept_dtype(const Family* family, const ModelConfig* config, std::string_view parameter, DType as);
// Returns the same for all parameters of a rule of the family.
std::optional<DType> kept_dtype(const Family& family, const ModelConfig* config, const NameRule& rule, DType as);

// Returns whether the table covers the config's model type, even if nothing stays float32.
bool knows_kept_dtypes(const ModelConfig& config);
// Returns the version of transformers that the table is from, "5.24.0".
std::string_view kept_dtypes_version();

}  // namespace reshard
