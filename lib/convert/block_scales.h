// Float8 matrices with a scale for each block (DeepSeek's FP8: x.weight beside x.weight_scale_inv), made into matrices
// of the dtype that is asked for as they are read: the element times the scale of its block in float32, rounded once,
// as transformers does it (integrations/finegrained_fp8.py).
#pragma once

#include <memory>
#include <vector>

#include "lib/convert/steps.h"
#include "lib/engine/computed_source.h"

namespace reshard {

struct ScaledMatrix {
  std::size_t matrix = 0, scales = 0;  // in the view
  Index block_rows = 0, block_columns = 0;
};

struct BlockScales {
  std::vector<ScaledMatrix> matrices;  // empty: none
  std::unique_ptr<Catalog> stored;     // the view as it was; null where nothing is scaled
};

// Of a view whose model is known: gives matrices that `typing` makes another dtype that dtype, and takes their scales
// out of what is written (SourceView::applied). Errors name a matrix without scales, scales of another shape than its
// blocks, and one that would stay as it is beside others that do not.
Result<BlockScales> apply_block_scales(SourceView& view, const Model& model, const Typing& typing, Notes& notes);

// Makes those tensors of `source` what they are to be. Refers to all but `scales`.
void set_scaled(const BlockScales& scales, TensorSource& stored, ComputedSource& source);

}  // namespace reshard
