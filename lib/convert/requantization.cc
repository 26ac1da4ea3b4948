#include "lib/convert/requantization.h"

#include "lib/convert/block_scales.h"
#include "lib/convert/fp8_blocks.h"
#include "lib/convert/mxfp4.h"

namespace reshard {

Result<Requantization> requantize(SourceView& view, const Translation& names, const Selection& selection,
                                  const Typing& typing, const Format& format, Notes& notes) {
  if (typing.quantize) return quantize_fp8_blocks(view, names, selection, typing, format, notes);
  Requantization out = TRY(apply_block_scales(view, names.model, typing, notes));
  return out.stored ? std::move(out) : unpack_mxfp4(view, names.model, typing, notes);
}

void set_requantized(const Requantization& made, TensorSource& stored, ComputedSource& source) {
  for (const ComputedTensor& t : made.tensors)
    source.set(t.tensor, t.fill_of(stored, source.catalog().tensors()[t.tensor].dtype));
}

}  // namespace reshard
