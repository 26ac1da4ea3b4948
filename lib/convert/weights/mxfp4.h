// Experts' matrices in MXFP4 (gpt-oss: x_blocks, of uint8 that hold two 4-bit floats each, and x_scales, of exponents),
// and the same as matrices of floats, in and out swapped: value x 2^(scale - 127), as transformers does it
// (integrations/mxfp4.py, convert_moe_packed_tensors).
#pragma once

#include "lib/convert/weights/computed_weights.h"

namespace reshard {

// Of a view whose model is known, what `typing` makes another dtype: the matrices take the place of their blocks and
// scales. Errors name blocks without scales, scales without blocks, and shapes that do not fit together.
Result<Requantization> unpack_mxfp4(SourceView& view, const Model& model, const Typing& typing, ConversionNotes& notes);

// The other way, of the matrices that the family holds in MXFP4, all of them: blocks and scales take their place. The
// scale of 32 values is the least power of two that brings their largest magnitude to 6 at most; of the 4-bit values
// the nearest is taken, and of two as near the larger, as triton_kernels does it (numerics_details/mxfp.py,
// downcast_to_mxfp). What was unpacked becomes the same values again. No tensors where there are no such matrices;
// unsupported where one is not of floating-point numbers, or its input no multiple of 32.
Result<Requantization> pack_mxfp4(SourceView& view, const Model& model, const Typing& typing, ConversionNotes& notes);

}  // namespace reshard
