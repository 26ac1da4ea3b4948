// SPDX-License-Identifier: Apache-2.0
// Conversion of Adam's state between frameworks. torch keeps the moments and the step of each parameter; others keep
// one step for all parameters, and a float32 master copy of each weight that the model stores in a smaller dtype.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "lib/checkpoint/format.h"
#include "lib/convert/view/source_view.h"

namespace reshard {

// For StateSupport::kAdam: adds a master copy of each parameter that has moments; the weight itself if the source has
// no master. Fails (unsupported) if a parameter lacks a moment or has state that Adam does not have.
Status add_masters(SourceView& view, ConversionNotes& notes);

// For StateSupport::kAdam: takes the step tensors out of the view and returns their value, on which they must agree.
// Returns nothing if there are none, and 0 with `metadata_only`.
Result<std::optional<Index>> take_steps(SourceView& view, FilePool& files, bool metadata_only);

// For formats that keep a step with each parameter: adds a step tensor for each parameter that has moments but no step,
// if the source counts steps once for all parameters: in objects of its parameter groups, or in scalars whose names in
// the view are their plain keys (optimizer.param_groups.0.step). Does nothing if these steps differ, or if the view
// keeps the names of a trainer that counts once.
Status add_steps(SourceView& view, Reader& source, FilePool& files);

// For conventions whose trainer counts steps once for all parameters (ConventionInfo::counters, plain keys): replaces
// the steps of the parameters by these scalars, of int32, unless the source has them. Does nothing if the source has no
// moments or no step. Fails (unsupported) if the steps differ.
Status count_steps_once(SourceView& view, std::span<const std::string_view> counters, Reader& source, FilePool& files);

}  // namespace reshard
