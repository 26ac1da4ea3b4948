// SPDX-License-Identifier: Apache-2.0
// Which matrices transformers stores [in, out]: those of its Conv1D modules (transformers/pytorch_utils.py), as in
// GPT-2. All libraries that pack weights turn such a module into a linear one, [out, in], and PEFT adds the transpose
// of an adapter's product to it.
//
// The table is extracted from transformers for all of its model types (samples/families/transposed.json, made by
// samples/families/generate.py).
#pragma once

#include <string_view>

#include "lib/model/family.h"

namespace reshard {

// Returns whether a parameter is stored [in, out] in a model of the config's type or one of its parts' types or,
// without a config, of the family's types. `parameter` is a plain key (parts.h). `family` and `config` may be null.
// Thread-safe.
bool is_stored_transposed(const Family* family, const ModelConfig* config, std::string_view parameter);
// Returns whether a model type exists that stores a parameter of this name [in, out].
bool may_be_stored_transposed(std::string_view parameter);

}  // namespace reshard
