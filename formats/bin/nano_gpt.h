// What nanoGPT's train.py saves beside a model, for a config.json of transformers' GPT-2:
//
//   {"model": ..., "optimizer": ..., "model_args": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024,
//    "bias": False, "vocab_size": 50304, "dropout": 0.0}, "iter_num": 2000, ...}
#pragma once

#include <map>
#include <optional>
#include <string>

#include "formats/encoding/pickle.h"
#include "lib/base/json.h"
#include "lib/layout/dtype.h"

namespace reshard::bin {

// By key. The values live as long as their document.
using ModelArgs = std::map<std::string, pickle::Value, std::less<>>;

// Nothing where they are not all of GPTConfig's (model.py).
std::optional<Json> config_of_nano_gpt(const ModelArgs& args, DType dtype);

}  // namespace reshard::bin
