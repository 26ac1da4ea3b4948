// SPDX-License-Identifier: Apache-2.0
// Checks whether a checkpoint holds what its metadata claims: exact cover, files, offsets. It lists all faults, while
// validate() stops at the first.
#pragma once

#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/checkpoint/format.h"

namespace reshard {

struct StructureAudit {
  std::vector<Finding> findings;
  bool metadata_only = false;  // no data file is here, so they are not reported as missing
  bool is_readable = true;     // the data can be read as the metadata says
  bool headers_read = false;   // the headers around the pieces were checked against the metadata too (up to 100,000)
};

// Requires a checkpoint opened with OpenOptions{.files_too = false, .validated = false}, and locates its tensors.
// `spool` as in Reader::locate().
StructureAudit audit_structure(Reader& reader, int threads, const std::string& spool);

}  // namespace reshard
