// Experts' matrices in MXFP4 (gpt-oss: x_blocks, of uint8 that hold two 4-bit floats each, and x_scales, of exponents),
// made into matrices of the dtype that is asked for as they are read: value x 2^(scale - 127), and in and out swapped,
// as transformers does it (integrations/mxfp4.py, convert_moe_packed_tensors).
#pragma once

#include "lib/convert/requantization.h"

namespace reshard {

// Of a view whose model is known: the matrices take the place of their blocks and scales. Errors name blocks without
// scales, scales without blocks, and shapes that do not fit together.
Result<Requantization> unpack_mxfp4(SourceView& view, const Model& model, const Typing& typing, Notes& notes);

}  // namespace reshard
