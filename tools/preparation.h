// SPDX-License-Identifier: Apache-2.0
// Opens the sources of a conversion and prepares it from its options.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "formats/registry.h"
#include "lib/convert/conversion.h"
#include "tools/job_options.h"

namespace reshard::tools {

// The open sources of a conversion, and the conversion.
struct PreparedConversion {
  OpenCheckpoint source;
  std::optional<OpenCheckpoint> donor, adapter;
  std::vector<OpenCheckpoint> merged;  // further sources of a merge
  const Format* target = nullptr;
  ConversionOptions options;    // refer to the open sources
  bool allows_objects = false;  // whose pickles may run code
  std::unique_ptr<Conversion> conversion;
};
Result<PreparedConversion> prepare(const ConvertOptions& options, bool metadata_only);
// The two parts of prepare(): opens the sources without preparing a conversion, and replaces the conversion by a new
// one.
Result<PreparedConversion> open_sources(const ConvertOptions& options, bool files_too);
enum class PlanOf { kSizes, kMetadata, kData };  // ConversionOptions::sizes_only, metadata_only, neither
Status prepare_again(PreparedConversion& p, PlanOf of);

}  // namespace reshard::tools
