// Fuzzes Meta's params.json: a config.json made from it can be read.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "formats/meta/meta.h"
#include "lib/model/config.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::meta_params_fuzz {

FUZZ_TARGET(meta_params)(const std::uint8_t* data, std::size_t size) {
  const auto params = parse_json({reinterpret_cast<const char*>(data), size}, "input");
  if (!params) return 0;
  (void)meta::unknown_part(*params);
  const auto config = meta::make_config(*params, Catalog(), "input");
  if (!config) {
    require(!config.error().message().empty());
    return 0;
  }
  const auto model = ModelConfig::parse(*config, "made");
  require(model || !model.error().message().empty());
  return 0;
}

}  // namespace reshard::meta_params_fuzz
