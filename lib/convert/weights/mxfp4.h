// SPDX-License-Identifier: Apache-2.0
// Conversion of experts' matrices between MXFP4 and floating point. gpt-oss stores x_blocks (uint8, two 4-bit floats
// each) and x_scales (exponents); the matrix has the input and output dimensions swapped and the elements
// value * 2^(scale - 127), as in transformers (integrations/mxfp4.py, convert_moe_packed_tensors).
#pragma once

#include "lib/convert/weights/computed_weights.h"

namespace reshard {

// Replaces blocks and scales by matrices, in a view whose model is known, if `typing` asks for another dtype. Fails,
// naming the tensor, for blocks without scales, scales without blocks, and shapes that do not fit each other.
Result<Requantization> unpack_mxfp4(SourceView& view, const Model& model, const Typing& typing, ConversionNotes& notes);

// Replaces the matrices that the family stores in MXFP4, all of them, by blocks and scales. The scale of 32 values is
// the smallest power of two that brings their largest magnitude to at most 6; an element becomes the nearest 4-bit
// value and, of two equally near, the larger, as in triton_kernels (numerics_details/mxfp.py, downcast_to_mxfp).
// Unpacked values become the same 4-bit values again. Returns no tensors if there are no such matrices. Fails
// (unsupported) if one is not floating-point or its input is not a multiple of 32.
Result<Requantization> pack_mxfp4(SourceView& view, const Model& model, const Typing& typing, ConversionNotes& notes);

}  // namespace reshard
