// An inspection as people and programs read it.
#pragma once

#include <string>
#include <vector>

#include "lib/base/json.h"
#include "tools/inspection.h"

namespace reshard::tools {

// Which tensors are shown, and how closely.
struct ReportOptions {
  bool shards = false;               // each box of each tensor
  std::vector<std::string> filters;  // globs, one of which a tensor's name must match; none: all tensors
};

// To standard output; the tensors of homogeneous layers as one line, unless filters or shards are asked for.
void print_text(const Inspection& in, const ReportOptions& options);

// docs/cli.md describes it.
Json to_json(const Inspection& in, const ReportOptions& options);

}  // namespace reshard::tools
