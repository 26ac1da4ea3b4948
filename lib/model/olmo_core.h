// SPDX-License-Identifier: Apache-2.0
// OLMo-core's own config.json, which it writes next to its checkpoints.
//
//     {"model": {"d_model": 64, "n_layers": 3, "vocab_size": 1000, ..., "_CLASS_": "olmo_core.nn...",
//                "block": {"name": "reordered_norm", "sequence_mixer": {"n_heads": 4, "rope": {...}, ...},
//                          "feed_forward": {"hidden_size": 256, ...}, ...}},
//      "dataset": {"tokenizer": {"eos_token_id": 88, ...}, "sequence_length": 64, ...}, ...}
//
// Written by: olmo_core/nn/transformer/config.py (TransformerConfig), olmo_core/train/callbacks/config_saver.py.
// Earlier versions call the sequence mixer "attention". olmo_core/nn/hf/config.py says which transformers model it is.
#pragma once

#include "lib/base/json.h"
#include "lib/base/result.h"

namespace reshard {

bool is_config_of_olmo_core(const Json& json);

// Returns the config of transformers' OLMo 2 or 3 that is the same model. Unsupported if there is none.
Result<Json> config_of_olmo_core(const Json& json);

}  // namespace reshard
