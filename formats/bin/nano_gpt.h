// SPDX-License-Identifier: Apache-2.0
// Makes a config.json of transformers' GPT-2 from what nanoGPT's train.py saves with a model:
//
//   {"model": ..., "optimizer": ..., "model_args": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024,
//    "bias": False, "vocab_size": 50304, "dropout": 0.0}, "iter_num": 2000, ...}
#pragma once

#include <optional>

#include "formats/encoding/pickle.h"
#include "lib/base/json.h"
#include "lib/layout/dtype.h"

namespace reshard::bin {

// Returns the config for "model_args" and the dtype of the parameters, or nothing if a member of GPTConfig (model.py)
// is missing.
std::optional<Json> config_of_nano_gpt(const pickle::Value& args, DType dtype);

}  // namespace reshard::bin
