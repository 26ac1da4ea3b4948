// Fuzzes our own code for HDF5: undoing a chunk's filters, and parsing names and positions in a state_dict. (libhdf5
// parses files in a separate process.) The first byte chooses: 0 is a key path, others the number of filters, one byte
// each; two more bytes give the chunk's size.
#include <cstdint>
#include <string>

#include "formats/encoding/key_path.h"
#include "formats/hdf5/names.h"
#include "lib/device/codec.h"
#include "tests/fuzz/fuzz_target.h"

namespace reshard::hdf5_fuzz {
namespace {

void try_key_path(const std::string& text) {
  const auto path = parse_key_path(text, "input");
  if (!path) return;
  const auto again = parse_key_path(key_path_text(*path), "input");
  require(again && *again == *path);
}

void try_names(const std::string& text) {
  const std::string half = text.substr(0, text.size() / 2);
  hdf5::PathMaker paths({text, half});
  const std::string a = paths.path_of(text);
  require(text == half || a != paths.path_of(half));
}

void try_chunk(int count, Bytes bytes) {
  ChunkEncoding encoding;
  std::size_t at = 0;
  const auto next = [&] { return at < bytes.size() ? static_cast<std::uint8_t>(bytes[at++]) : std::uint8_t{0}; };
  for (int i = 0; i < count; ++i) {
    const std::uint8_t b = next();
    encoding.filters.push_back({static_cast<ChunkFilter::Kind>(b % 4), 1 + b / 4});
  }
  encoding.decoded_bytes = next() << 8;
  encoding.decoded_bytes += next();
  std::string stored(as_string(bytes.subspan(at)));
  ChunkDecoder decoder;
  const auto out = decoder.decode({reinterpret_cast<std::byte*>(stored.data()), stored.size()}, encoding, "input");
  require(!out || static_cast<Index>(out->size()) == encoding.decoded_bytes);
}

}  // namespace

FUZZ_TARGET(hdf5)(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const Bytes bytes(reinterpret_cast<const std::byte*>(data) + 1, size - 1);
  if (data[0] == 0) {
    try_key_path(std::string(as_string(bytes)));
    try_names(std::string(as_string(bytes)));
  } else {
    try_chunk(data[0] % 6, bytes);
  }
  return 0;
}

}  // namespace reshard::hdf5_fuzz
