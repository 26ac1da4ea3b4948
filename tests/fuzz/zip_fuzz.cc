// Fuzzes zip archives: accepted ones have members that are inside the file and do not overlap.
#include <cstddef>
#include <cstdint>

#include "formats/encoding/zip.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::zip_fuzz {

FUZZ_TARGET(zip)(const std::uint8_t* data, std::size_t size) {
  const File& file = input_file(data, size);
  const auto length = static_cast<Index>(size);
  const auto archive = zip::Archive::open(file, 0, length);
  if (!archive) return 0;
  Index payloads = 0;
  for (const zip::Entry& entry : archive->entries()) {
    require(fits_inside(entry.offset, entry.size, length));
    require(archive->find(entry.name) == &entry);
    payloads += entry.size;
    const auto bytes = archive->read(entry, length);
    require(!bytes || static_cast<Index>(bytes->size()) == entry.size);
  }
  require(payloads <= length);
  return 0;
}

}  // namespace reshard::zip_fuzz
