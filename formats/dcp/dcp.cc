// SPDX-License-Identifier: Apache-2.0
#include "formats/dcp/dcp.h"

#include <algorithm>

#include "lib/base/text.h"

namespace reshard {
namespace dcp {

bool is_rank_metadata(std::string_view name) { return take(name, "__") && take_number(name) && name == kMetadataFile; }

Result<bool> is_file_of_directory(const PathSnapshot& place) {
  const std::string name = place.name();
  if (place.is_directory() || !(name.ends_with(kDataEnding) || name.ends_with(kMetadataFile))) return false;
  return TRY(place.parent())->has_hidden_file(kMetadataFile);
}

namespace {

// Returns whether this is a DCP directory, or one of its files, which stands for all of it.
Result<bool> recognises(const PathSnapshot& place) {
  if (!place.is_directory()) return is_file_of_directory(place);
  return std::any_of(place.entries().begin(), place.entries().end(), [](const DirectoryEntry& e) {
    return e.name == kMetadataFile || e.name == kUnfinishedMetadata || is_rank_metadata(e.name) ||
           (e.name.starts_with("__") && e.name.ends_with(kDataEnding));
  });
}

}  // namespace
}  // namespace dcp

const Format kDcpFormat = {
    .name = "dcp",
    .title = "PyTorch DCP",
    .recognises = dcp::recognises,
    .open = dcp::open,
    .lay_out = dcp::lay_out,
    .sharding = Sharding::kBoxes,
};

}  // namespace reshard
