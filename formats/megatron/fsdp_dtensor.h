// SPDX-License-Identifier: Apache-2.0
// Megatron-FSDP's checkpoints (--ckpt-format fsdp_dtensor): plain directories of PyTorch DCP, which have Megatron's
// args as an object among the others (megatron/training/checkpointing.py, generate_state_dict and
// preprocess_fsdp_dtensor_state_dict).
#pragma once

#include <memory>

#include "lib/checkpoint/format.h"

namespace reshard::megatron {

// Returns a reader of the same checkpoint that makes a config.json from the object "args" if there is none next to it.
// Returns the reader itself if there is no such object, or if it does not describe a known model; a note then says why.
Result<std::unique_ptr<Reader>> with_config_of_args(std::unique_ptr<Reader> reader);

}  // namespace reshard::megatron
