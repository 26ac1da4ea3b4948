// Builds objects of OCDBT databases, including ones that tensorstore never writes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/device/crc32.h"

namespace reshard {

inline constexpr std::uint32_t kOcdbtManifest = 0x0cdb3a2a, kOcdbtNode = 0x0cdb20de;

inline std::string varint(std::uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7f) | 0x80);
  return out + static_cast<char>(value);
}

inline std::string varints(const std::vector<std::uint64_t>& values) {
  std::string out;
  for (const std::uint64_t value : values) out += varint(value);
  return out;
}

template <class T>
std::string little_endian(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// Returns an object with this body: magic number, length, version, compression (0 none, 1 zstd), body and checksum.
inline std::string ocdbt_object(std::uint32_t magic, std::string_view body, int compression = 0) {
  std::string out = little_endian(__builtin_bswap32(magic)) + little_endian(std::uint64_t{18} + body.size()) + '\0' +
                    static_cast<char>(compression) + std::string(body);
  return out + little_endian(crc32c(0, as_bytes(out)));
}

// Returns a table of one file; the files of its nodes are relative to the database's directory.
inline std::string ocdbt_file(std::string_view path) { return varints({1, path.size(), 0}) + std::string(path); }

// The location of a node.
struct OcdbtRoot {
  int height = 0;
  std::uint64_t offset = 0, length = 0, keys = 0;
};

// Returns a manifest with one version, whose root is in the file `path`.
inline std::string ocdbt_manifest(std::string_view path, const OcdbtRoot& root) {
  return ocdbt_object(kOcdbtManifest, std::string(16, 'u') + varints({0, 1024, 100'000'000}) + '\4' + '\0' +
                                          ocdbt_file(path) + varints({1, 1}) + static_cast<char>(root.height) +
                                          varints({0, root.offset, root.length, root.keys, 0, 0}) +
                                          std::string(8, '\0') + varint(0));
}

// Returns a node with one child in the file `path`.
inline std::string ocdbt_parent(std::string_view path, const OcdbtRoot& child, std::string_view prefix = "") {
  return ocdbt_object(kOcdbtNode, static_cast<char>(child.height + 1) + ocdbt_file(path) +
                                      varints({1, prefix.size(), prefix.size()}) + std::string(prefix) +
                                      varints({0, child.offset, child.length, child.keys, 0, 0}));
}

// Returns a leaf with these keys (ascending, up to 127 bytes) and inline values.
inline std::string ocdbt_leaf(const std::vector<std::pair<std::string, std::string>>& values) {
  std::string lengths, keys, sizes, bytes;
  for (const auto& [key, value] : values) {
    lengths += varint(key.size());
    keys += key;
    sizes += varint(value.size());
    bytes += value;
  }
  const std::string zeros(values.size(), '\0');
  return ocdbt_object(
      kOcdbtNode, '\0' + varint(0) + varint(values.size()) + zeros.substr(1) + lengths + keys + sizes + zeros + bytes);
}

}  // namespace reshard
