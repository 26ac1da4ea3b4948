// Whether a checkpoint holds what it says it holds: exact cover, files, stored places. What validate() refuses at the
// first fault, an audit lists.
#pragma once

#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/checkpoint/format.h"

namespace reshard {

struct StructureAudit {
  std::vector<Finding> findings;
  bool metadata_only = false;  // none of the data files is here: then they are not missed
  bool is_readable = true;     // the data can be read as the metadata says
  bool headers_read = false;   // the headers around the pieces were held against the metadata too (up to 100,000)
};

// For a checkpoint that was opened with OpenOptions{.files_too = false, .validated = false}; locates its tensors.
// `spool` as in Reader::locate.
StructureAudit audit_structure(Reader& reader, int threads, const std::string& spool);

}  // namespace reshard
