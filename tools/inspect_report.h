// SPDX-License-Identifier: Apache-2.0
// Prints an inspection as text, JSON and the data of a page.
#pragma once

#include <string>
#include <vector>

#include "lib/base/json.h"
#include "tools/inspection.h"

namespace reshard::tools {

// Which tensors are shown, and in which detail.
struct ReportOptions {
  bool shards = false;               // each box of each tensor
  std::vector<std::string> filters;  // shows tensors whose names match one of these globs; empty: all tensors
};

// Prints text. The tensors of homogeneous layers are one line, unless there are filters or shards are shown.
void print_text(const Inspection& in, const ReportOptions& options);

// Prints JSON; docs/cli.md has the schema.
void print_json(const Inspection& in, const ReportOptions& options);

// Returns the data of a page. All boxes of all tensors take few bytes, because layers are sharded alike and file
// numbers ascend.
//   files.list  [path, bytes or -1, the rank that wrote it or -1] of each
//   layouts     dtype, shape, placement, bytes; `boxes` and `copies`: columns of the origins, then of the shapes
//   lists       numbers of files
//   tensors     [name, kind, its layout, the list of its boxes' files, that of its copies' files]
// A column or list is runs of numbers: first, step, count, first, ...
Json page_json(const Inspection& in, const ReportOptions& options);

}  // namespace reshard::tools
