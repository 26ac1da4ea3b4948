// Lays out a Hugging Face checkpoint. See safetensors.h.
#pragma once

#include <memory>

#include "lib/checkpoint/format.h"

namespace reshard {

// Whole tensors, back to back in the request's order, in as many files of at most request.max_file_bytes of data as it
// takes (a larger tensor has a file of its own). One file is model.safetensors; several are numbered and have an index,
// which is the last of the target's files. Unsupported for more than one rank and for element types without a name.
Result<std::unique_ptr<Target>> lay_out_safetensors(LayoutRequest request);

}  // namespace reshard
