// Fuzzes nodes of OCDBT trees with a valid checksum: the first byte of the input is the height, the rest the body.
#include <cstddef>
#include <cstdint>
#include <string>

#include "formats/orbax/ocdbt.h"
#include "lib/base/text.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"
#include "tests/support/ocdbt.h"

namespace reshard::ocdbt_node_fuzz {

using namespace reshard::orbax;

FUZZ_TARGET(ocdbt_node)(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const int height = data[0] % 4;
  const std::string body(reinterpret_cast<const char*>(data), size);
  const std::string object = ocdbt_object(kOcdbtNode, static_cast<char>(height) + body.substr(1));
  std::string last;
  Index values = 0;
  const auto node = parse_node(as_bytes(object), height, "ocdbt.process_0/", "f", 0,
                               [&](const LeafValue& value, const std::vector<DataFile>& files) -> Status {
                                 require(value.key.size() <= 65'535 && value.length >= 0);
                                 require(value.is_inline ? std::ssize(value.bytes) == value.length
                                                         : value.file < files.size() && value.offset >= 0);
                                 ++values;
                                 return {};
                               });
  if (!node) return 0;
  require(values == node->values && (height == 0 || values == 0));
  for (const DataFile& file : node->files)
    require(is_safe_relative_path(file.path) && file.path.starts_with(file.base) &&
            file.base.starts_with("ocdbt.process_0/"));
  for (const Child& child : node->children) require(child.file < node->files.size() && child.length >= 0);
  return 0;
}

}  // namespace reshard::ocdbt_node_fuzz
