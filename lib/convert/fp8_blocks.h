// Matrices made float8 (e4m3fn) in blocks of 128 x 128 with a scale each, x.weight beside x.weight_scale_inv, as
// DeepSeek publishes them and transformers quantizes them (integrations/finegrained_fp8.py, Fp8Quantize): in float32
// the scale is 448 times the reciprocal of the largest magnitude of the block, the element times the scale is rounded
// once, and the reciprocal of the scale is stored.
#pragma once

#include "lib/convert/requantization.h"

namespace reshard {

// Every matrix that the family marks `quantized` but for those that `typing` keeps. A block that lies across the edge
// of its matrix is of what is there. Unsupported where the family has no such matrices, for a model that is quantized
// already, and under names that have none for scales.
Result<Requantization> quantize_fp8_blocks(SourceView& view, const Translation& names, const Selection& selection,
                                           const Typing& typing, const Format& format, Notes& notes);

}  // namespace reshard
