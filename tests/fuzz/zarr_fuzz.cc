// Fuzzes the metadata of a zarr array and, after a zero byte, the index of a shard: chunks are inside the array and
// their elements inside the chunk.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "formats/orbax/zarr.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::zarr_fuzz {

using namespace reshard::orbax;

namespace {

void check_chunk(const ZarrArray& array) {
  Index last = 0;
  const Dims strides = array.chunk.strides();
  for (int d = 0; d < strides.rank(); ++d) last += (array.chunk.shape[d] - 1) * strides[d];
  require(last == volume(array.chunk.shape) - 1);
}

void check_shard(const ZarrArray& array, std::string_view bytes) {
  const auto where = place_of_index(array, std::ssize(bytes));
  if (!where) return;
  require(fits_inside(where->offset, where->length, std::ssize(bytes)));
  const Bytes index =
      as_bytes(bytes.substr(static_cast<std::size_t>(where->offset), static_cast<std::size_t>(where->length)));
  const auto chunks = parse_shard_index(array, index, std::ssize(bytes));
  if (!chunks) return;
  for (const InnerChunk& chunk : *chunks) {
    require(contains(whole(array.grid), chunk.box));
    require(!chunk.bytes || fits_inside(chunk.bytes->first, chunk.bytes->second, std::ssize(bytes)));
  }
}

}  // namespace

FUZZ_TARGET(zarr)(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t end = std::min(input.find('\0'), size);
  const std::string_view text = input.substr(0, end), shard = input.substr(std::min(end + 1, size));
  for (const auto& array : {parse_zarr2(text, "a/.zarray"), parse_zarr3(text, "a/zarr.json")}) {
    if (!array) continue;
    check_chunk(*array);
    const Dims counts = array->counts();
    require(checked_volume(counts).has_value());
    Dims last = counts;
    for (int d = 0; d < counts.rank(); ++d) last[d] = std::max<Index>(counts[d] - 1, 0);
    require(contains(whole(array->shape), array->box_of(last)) && !array->key_of(last).empty());
    if (array->shards) check_shard(*array, shard);
  }
  return 0;
}

}  // namespace reshard::zarr_fuzz
