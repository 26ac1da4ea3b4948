#include "formats/dcp/dcp.h"

#include <algorithm>

#include "lib/base/text.h"

namespace reshard {
namespace dcp {

bool is_rank_metadata(std::string_view name) { return take(name, "__") && take_number(name) && name == kMetadataFile; }

bool is_file_of_directory(const std::string& path) {
  const std::string name = base_name(path);
  if (is_directory(path) || !(name.ends_with(kDataEnding) || name.ends_with(kMetadataFile))) return false;
  return path_exists(path_join(parent_path(path), kMetadataFile));
}

namespace {

// A file of one stands for all of it.
bool recognises(const std::string& path) {
  if (!is_directory(path)) return is_file_of_directory(path);
  const auto entries = list_directory(path);
  return entries && std::any_of(entries->begin(), entries->end(), [](const DirectoryEntry& e) {
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
