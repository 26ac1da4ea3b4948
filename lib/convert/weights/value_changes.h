// SPDX-License-Identifier: Apache-2.0
// Conventions that store other values than Hugging Face: MaxText's queries are divided by the root of head_dim, and the
// norms of its Gemma models have 1 added. The values are changed in float32 as they are read, and rounded once to the
// dtype of the output.
#pragma once

#include <memory>
#include <vector>

#include "lib/convert/view/conversion_notes.h"
#include "lib/convert/view/source_view.h"
#include "lib/convert/view/translation.h"
#include "lib/source/computed_source.h"

namespace reshard {

// x + by, or x * by, in float32.
struct ValueStep {
  enum class Kind { kTimes, kPlus } kind = Kind::kTimes;
  float by = 1;
};

struct ChangedTensor {
  std::size_t tensor = 0;  // of the view
  std::vector<ValueStep> steps;
};

struct ValueChanges {
  std::vector<ChangedTensor> tensors;  // empty: none
  std::unique_ptr<Catalog> before;     // the view whose values are changed; null if none are
};

// Finds the tensors of a final view whose values differ between the source's convention and the output's. They become
// float32 in the view. Tensor::model_dtype keeps their own dtype, except for tensors to which the output adds 1:
// MaxText stores these in float32. Adam's moments change as the gradients do: if the stored value is k times the
// parameter, its first moment is 1 / k and its second 1 / k^2 times the parameter's. Fails (unsupported) for a tensor
// that is not floating-point.
Result<ValueChanges> change_values(SourceView& view, const Translation& names, ConversionNotes& notes);

// Sets the changed tensors of `source`, computed from those of `before`. All arguments must outlive `source`.
void set_changed(const ValueChanges& changes, TensorSource& before, ComputedSource& source);

}  // namespace reshard
