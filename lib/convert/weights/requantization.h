// SPDX-License-Identifier: Apache-2.0
// Weights whose quantization changes: they are dequantized to a dtype (--dtype) or quantized, with scales next to them
// (--quantize), as they are read.
#pragma once

#include "lib/convert/weights/computed_weights.h"

namespace reshard {

// Applies `typing` to a view whose model is known: sets the dtypes and shapes of its tensors to those of the output,
// and adds the tensors that the output does not contain to SourceView::applied. Fails, naming the tensor, for a matrix
// without scales, scales whose shape does not fit, and matrices that cannot be quantized.
Result<Requantization> requantize(SourceView& view, const Translation& names, const Selection& selection,
                                  const DtypeOptions& typing, const Format& format, ConversionNotes& notes);

}  // namespace reshard
