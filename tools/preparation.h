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
  std::unique_ptr<Conversion> conversion;
};
Result<PreparedConversion> prepare(const ConvertOptions& options, bool metadata_only);

}  // namespace reshard::tools
