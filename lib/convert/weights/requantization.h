// Weights that are written quantized otherwise than they are stored: made, as they are read, into matrices of the dtype
// that is asked for (--dtype), or into smaller ones beside their scales (--quantize).
#pragma once

#include "lib/convert/weights/computed_weights.h"

namespace reshard {

// What `typing` asks for, of a view whose model is known: the view's tensors get the dtypes and shapes that they are
// written in, those that the output lacks are SourceView::applied. Errors name a matrix without scales, scales of
// another shape than their blocks, and what cannot be quantized.
Result<Requantization> requantize(SourceView& view, const Translation& names, const Selection& selection,
                                  const Typing& typing, const Format& format, ConversionNotes& notes);

}  // namespace reshard
