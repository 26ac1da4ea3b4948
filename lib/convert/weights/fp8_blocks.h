// SPDX-License-Identifier: Apache-2.0
// Quantization to float8 (e4m3fn): x.weight next to x.weight_scale_inv, as transformers does it
// (integrations/finegrained_fp8.py, Fp8Quantize), with a scale for each block of 128 x 128, as DeepSeek publishes them,
// or for each matrix. In float32, the scale is 448 times the reciprocal of the largest magnitude, an element times the
// scale is rounded once, and the reciprocal of the scale is stored.
#pragma once

#include "lib/convert/weights/computed_weights.h"

namespace reshard {

// Quantizes the matrices that the family marks `quantized` or, with one scale for each matrix, the matrices of layers
// that tensor parallelism shards; not those that `typing` keeps. A block at the edge of a matrix is smaller. Returns no
// tensors if there are no such matrices. Fails (unsupported) if one is not floating-point.
Result<Requantization> quantize_fp8(SourceView& view, const Model& model, const Typing& typing, ConversionNotes& notes);

}  // namespace reshard
