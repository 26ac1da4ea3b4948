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

// Likewise; docs/cli.md describes it.
void print_json(const Inspection& in, const ReportOptions& options);

// The same for a page, with every box of every tensor in few bytes: tensors of a model's layers are cut alike, and
// numbers of files ascend.
//   files.list  [path, bytes or -1, the rank that wrote it or -1] of each
//   layouts     dtype, shape, placement, bytes; `boxes` and `copies`: columns of the origins, then of the shapes
//   lists       numbers of files
//   tensors     [name, kind, its layout, the list of its boxes' files, that of its copies' files]
// A column or list is runs of numbers: first, step, count, first, ...
Json page_json(const Inspection& in, const ReportOptions& options);

}  // namespace reshard::tools
