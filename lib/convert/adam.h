// Adam's state on its way between frameworks: torch keeps moments and a number of steps with each parameter, others one
// number for all, and a float32 master of each weight that the model has rounded.
#pragma once

#include <optional>

#include "lib/checkpoint/format.h"
#include "lib/convert/view/source_view.h"

namespace reshard {

// For Holds::kAdam: gives each parameter that has moments a master, the weight itself where the source has none apart.
// Unsupported where one lacks a moment, or has state that Adam does not.
Status add_masters(SourceView& view, ConversionNotes& notes);

// For Holds::kAdam: the number of steps that tensors of the view have, which have to agree; the output gets none of
// them. Nothing where there are none. 0 with `metadata_only`.
Result<std::optional<Index>> take_steps(SourceView& view, FilePool& files, bool metadata_only);

// For formats that keep a number with each parameter: where the source's groups have it instead, a tensor for each that
// has moments.
Status add_steps(SourceView& view, Reader& source, FilePool& files);

}  // namespace reshard
