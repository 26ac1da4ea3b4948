// SPDX-License-Identifier: Apache-2.0
// A plan for a page: --json's, and which files are read for which.
#pragma once

#include "lib/base/json.h"
#include "tools/preparation.h"

namespace reshard::tools {

// Files are taken in groups of consecutive ones, so that there are few however many files there are:
//   sources, targets  {first, count, bytes}: the path of a group's first file, how many it has, bytes read or written
//   flows             [number of the target group, number of the source group, bytes, moves]
//   rank_bytes        of each rank of --mesh, as Conversion::bytes_of_ranks has them
Json plan_page_json(const PreparedConversion& prepared, const ConvertOptions& options);

}  // namespace reshard::tools
