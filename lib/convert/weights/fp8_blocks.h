// Matrices made float8 (e4m3fn), x.weight beside x.weight_scale_inv, as transformers quantizes them
// (integrations/finegrained_fp8.py, Fp8Quantize): in blocks of 128 x 128 with a scale each, as DeepSeek publishes them,
// or with one scale for each matrix. In float32 the scale is 448 times the reciprocal of the largest magnitude, the
// element times the scale is rounded once, and the reciprocal of the scale is stored.
#pragma once

#include "lib/convert/weights/computed_weights.h"

namespace reshard {

// Every matrix that the family marks `quantized`, and with a scale for each matrix those of layers that tensor
// parallelism cuts, but for those that `typing` keeps. A block that lies across the edge of its matrix is of what is
// there. No tensors where there are no such matrices; unsupported where one is not of floating-point numbers.
Result<Requantization> quantize_fp8(SourceView& view, const Model& model, const Typing& typing, ConversionNotes& notes);

}  // namespace reshard
