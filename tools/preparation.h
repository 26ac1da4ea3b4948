// From the options of a conversion to what can run: its sources open, its steps done.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "formats/registry.h"
#include "lib/convert/conversion.h"
#include "tools/job_options.h"

namespace reshard::tools {

// An open source and what is to be made of it.
struct PreparedConversion {
  OpenCheckpoint source;
  std::optional<OpenCheckpoint> donor, adapter;
  std::vector<OpenCheckpoint> merged;  // with the source
  const Format* target = nullptr;
  ConversionOptions options;    // they refer to what is open
  bool allows_objects = false;  // that are not inert
  std::unique_ptr<Conversion> conversion;
};
Result<PreparedConversion> prepare(const ConvertOptions& options, bool metadata_only);
// Its two parts: what is open, without a conversion; and one of that, in place of the one that there was.
Result<PreparedConversion> open_sources(const ConvertOptions& options, bool files_too);
enum class PlanOf { kSizes, kMetadata, kData };  // ConversionOptions::sizes_only, metadata_only, neither
Status prepare_again(PreparedConversion& p, PlanOf of);

}  // namespace reshard::tools
