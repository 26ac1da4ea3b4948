// Fuzzes nanotron's texts, one per line: a file's name, the shape of a local tensor, that of the whole, and the slices
// that map one to the other. Boxes must be inside both.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "formats/nanotron/nanotron.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::nanotron_fuzz {

using namespace reshard::nanotron;

FUZZ_TARGET(nanotron)(const std::uint8_t* data, std::size_t size) {
  std::string_view text(reinterpret_cast<const char*>(data), size);
  std::array<std::string_view, 4> lines;
  for (std::string_view& line : lines) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  if (const auto name = parse_file_name(lines[0])) {
    require(!name->parameter.empty() && name->stage >= 0 && name->stage < name->stages);
    require(name->ranks == 0 || (name->rank >= 0 && name->rank < name->ranks));
  }
  const auto local = parse_shape(lines[1]), whole_shape = parse_shape(lines[2]);
  if (!local || !whole_shape) return 0;
  const auto boxes = parse_slices(lines[3], *local, *whole_shape);
  if (!boxes) return 0;
  for (const LocalBox& b : *boxes) {
    require(contains(whole(*whole_shape), b.box));
    require(contains(whole(*local), Box{b.at, b.box.shape}));
  }
  return 0;
}

}  // namespace reshard::nanotron_fuzz
