// SPDX-License-Identifier: Apache-2.0
// Dequantization of float8 matrices that have a scale for each block (DeepSeek's FP8: x.weight next to
// x.weight_scale_inv), for each row (compressed-tensors, FBGEMM: x.weight_scale), or for the whole matrix (Ministral 3,
// with x.activation_scale). As in transformers (integrations/finegrained_fp8.py), an element is multiplied by its scale
// in float32 and rounded once; compressed-tensors rounds to the scales' dtype first.
#pragma once

#include "lib/convert/weights/computed_weights.h"

namespace reshard {

// If config.json describes the quantization (`float8`): sets the dtype of the matrices that `typing` changes, and
// removes their scales and those of their activations from the output (SourceView::applied). Fails, naming the tensor,
// for a matrix without scales, scales whose shape does not fit, and a matrix that would stay float8 while others do
// not.
Result<Requantization> apply_block_scales(SourceView& view, const std::optional<Float8Scales>& float8,
                                          const Typing& typing, ConversionNotes& notes);

}  // namespace reshard
