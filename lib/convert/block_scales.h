// Float8 matrices with a scale for each block (DeepSeek's FP8: x.weight beside x.weight_scale_inv), or one for all of
// it (Ministral 3's, with x.activation_scale beside it), made into matrices of the dtype that is asked for as they are
// read: the element times its scale in float32, rounded once, as transformers does it
// (integrations/finegrained_fp8.py).
#pragma once

#include "lib/convert/requantization.h"

namespace reshard {

// Of a view whose model is known: gives matrices that `typing` makes another dtype that dtype, and takes their scales
// out of what is written (SourceView::applied). Errors name a matrix without scales, scales of another shape than its
// blocks, and one that would stay as it is beside others that do not.
Result<Requantization> apply_block_scales(SourceView& view, const Model& model, const Typing& typing, Notes& notes);

}  // namespace reshard
