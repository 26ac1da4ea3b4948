// Fuzzes safetensors files: the header is refused or describes exactly the file's bytes, and the checkpoint opens or is
// refused.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "formats/encoding/safetensors_header.h"
#include "formats/hf/hf.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"
#include "tests/support/temp_dir.h"

namespace reshard::safetensors_fuzz {
namespace {

void check(const SafetensorsHeader& header, Index size) {
  Index end = header.data_start;
  for (const SafetensorsEntry& entry : header.entries) {
    require(entry.offset == end && entry.length == volume(entry.shape) * byte_size(entry.dtype));
    end += entry.length;
  }
  require(end == header.end && end == size);
}

}  // namespace

FUZZ_TARGET(safetensors)(const std::uint8_t* data, std::size_t size) {
  static const TempDir directory;
  const Bytes bytes(reinterpret_cast<const std::byte*>(data), size);
  const File& file = input_file(data, size);
  const auto length = static_cast<Index>(size);

  const auto header = read_safetensors_header(file, 0, length, SafetensorsEnd::kExact);
  const auto within = read_safetensors_header(file, 0, length, SafetensorsEnd::kWithin);
  const auto alone = read_safetensors_header(file, 0, length, SafetensorsEnd::kUnchecked);
  require(!header || within);
  require(!within || alone);
  if (!header) return 0;
  check(*header, length);

  std::vector<SafetensorsEntry> entries = header->entries;
  const auto text = safetensors_header(entries, header->metadata, 8);
  require(text && text->size() % 8 == 0);

  const std::string path = directory.write("model.safetensors", as_string(bytes));
  const auto place = PathSnapshot::look(path);
  require(place.has_value());
  const auto reader = kHfFormat.open(*place, OpenOptions{});
  if (reader) require((*reader)->catalog().tensor_bytes() == header->end - header->data_start);
  return 0;
}

}  // namespace reshard::safetensors_fuzz
