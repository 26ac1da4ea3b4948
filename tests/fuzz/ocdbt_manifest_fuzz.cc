// Fuzzes bodies of OCDBT manifests with a valid checksum, plain and compressed.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "formats/orbax/ocdbt.h"
#include "lib/base/text.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"
#include "tests/support/ocdbt.h"

namespace reshard::ocdbt_manifest_fuzz {

using namespace reshard::orbax;

FUZZ_TARGET(ocdbt_manifest)(const std::uint8_t* data, std::size_t size) {
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  for (const int compression : {0, 1}) {
    const std::string object = ocdbt_object(kOcdbtManifest, body, compression);
    const auto manifest = parse_manifest(as_bytes(object), "manifest.ocdbt");
    if (!manifest) continue;
    require(!manifest->is_numbered || !manifest->root);
    if (!manifest->root) continue;
    const NodeReference& root = *manifest->root;
    require(root.offset >= 0 && root.length >= 0 && root.keys >= 0 && root.height >= 0);
    require(is_safe_relative_path(root.file.path) && root.file.path.starts_with(root.file.base));
  }
  require(!parse_manifest(as_bytes(body), "manifest.ocdbt") || size > 18);  // uncompressed
  return 0;
}

}  // namespace reshard::ocdbt_manifest_fuzz
