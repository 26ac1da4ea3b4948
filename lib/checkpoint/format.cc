#include "lib/checkpoint/format.h"

#include "lib/base/text.h"

namespace reshard {

Result<std::optional<std::string>> Reader::side_file(const std::string& name, Index limit) {
  const std::string path = path_join(catalog_.root, name);
  if (!path_exists(path)) return std::optional<std::string>();
  return std::optional<std::string>(TRY(read_whole_file(path, limit)));
}

Status Target::add_side_file(const std::string& name, std::string_view) {
  return internal_error("'" + printable(name) + "': this format has files of their own for such things");
}

Status Target::encode(Index offset, Bytes, const EmitBytes&) {
  return internal_error("bytes at " + std::to_string(offset) + " to encode: this format stores them as they are");
}

}  // namespace reshard
