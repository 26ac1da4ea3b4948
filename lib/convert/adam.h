// SPDX-License-Identifier: Apache-2.0
// Conversion of Adam's state between frameworks. torch keeps the moments and the step of each parameter; others keep
// one step for all parameters, and a float32 master copy of each weight that the model stores in a smaller dtype.
#pragma once

#include <optional>

#include "lib/checkpoint/format.h"
#include "lib/convert/view/source_view.h"

namespace reshard {

// For Holds::kAdam: adds a master copy of each parameter that has moments; the weight itself if the source has no
// master. Fails (unsupported) if a parameter lacks a moment or has state that Adam does not have.
Status add_masters(SourceView& view, ConversionNotes& notes);

// For Holds::kAdam: takes the step tensors out of the view and returns their value, on which they must agree. Returns
// nothing if there are none, and 0 with `metadata_only`.
Result<std::optional<Index>> take_steps(SourceView& view, FilePool& files, bool metadata_only);

// For formats that keep a step with each parameter: adds a step tensor for each parameter that has moments, if the
// source keeps the step in its parameter groups.
Status add_steps(SourceView& view, Reader& source, FilePool& files);

}  // namespace reshard
