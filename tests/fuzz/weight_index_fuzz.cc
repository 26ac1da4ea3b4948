// Fuzzes weight indexes: files stay inside the directory, and every name can be looked up.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "formats/encoding/weight_index.h"
#include "lib/base/text.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::weight_index_fuzz {

FUZZ_TARGET(weight_index)(const std::uint8_t* data, std::size_t size) {
  const auto index = WeightIndex::parse(std::string_view(reinterpret_cast<const char*>(data), size), "index.json");
  if (!index) return 0;
  for (std::size_t i = 0; i < index->entries().size(); ++i) {
    require(index->find(index->entries()[i].name) == i);
    require(is_safe_relative_path(index->entries()[i].file));
  }
  require(index->files().size() <= index->entries().size());
  return 0;
}

}  // namespace reshard::weight_index_fuzz
