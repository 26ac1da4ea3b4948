// Float8 matrices with a scale for each block (DeepSeek's FP8: x.weight beside x.weight_scale_inv), each row
// (compressed-tensors, FBGEMM: x.weight_scale), or one for all of it (Ministral 3's, with x.activation_scale beside
// it), made into matrices of the dtype that is asked for as they are read: the element times its scale in float32,
// rounded once, as transformers does it (integrations/finegrained_fp8.py); compressed-tensors rounds to the scales'
// dtype first.
#pragma once

#include "lib/convert/weights/computed_weights.h"

namespace reshard {

// Where the model's config says how it is quantized (`float8`): gives matrices that `typing` makes another dtype that
// dtype, and takes their scales, and those of what they are multiplied with, out of what is written
// (SourceView::applied). Errors name a matrix without scales, scales of another shape than its blocks, and one that
// would stay as it is beside others that do not.
Result<Requantization> apply_block_scales(SourceView& view, const std::optional<Float8Scales>& float8,
                                          const Typing& typing, ConversionNotes& notes);

}  // namespace reshard
