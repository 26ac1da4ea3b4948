// SPDX-License-Identifier: Apache-2.0
// OCDBT, tensorstore's Optionally-Cooperative Distributed B+tree: a key-value database in a directory
// (tensorstore/kvstore/ocdbt/format/{manifest,btree,version_tree,indirect_data_reference}.cc).
//
//   manifest.ocdbt                  the configuration and the newest version; or, of the numbered kind, the
//                                   configuration alone
//   manifest.<16 hex digits>        of the numbered kind: a generation; the greatest is the newest
//   d/<32 hex digits>               nodes and values
//   ocdbt.process_N/d/...           the same, of a database that was merged into this one without copying
//
// Manifest, B+tree node and version node have one envelope:
//
//   u32 magic (big endian), u64 length of the whole, varint version (0), varint 0 or 1 (zstd), body, u32 CRC
//
// The CRC is the CRC-32C of all bytes before it. A varint is an unsigned LEB128. Tables are stored by column.
//
//   manifest       16 bytes of a uuid, varints: kind (0 single, 1 numbered), max_inline_value_bytes,
//                  max_decoded_node_bytes, u8 version_tree_arity_log2, varint compression [, i32 its level if it is 1];
//                  then, unless numbered: files, versions (the last is the state), nodes of older versions
//   files          count, lengths of shared prefixes (all but the first), of suffixes, of bases; the suffixes.
//                  A file's path is relative to the base of the one that its table was reached through
//   version        generation, height of the root, file, offset, length (2^64-1 twice: no keys), counts, u64 time
//   B+tree node    u8 height, files, count, keys (shared prefix, suffix [, length of the prefix that all keys of the
//                  child begin with], the suffixes); above the leaves: file, offset, length, counts of each child; in a
//                  leaf: lengths, kinds (0 inline, 1 in a file), file and offset of the latter, bytes of the former
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "formats/orbax/key_values.h"
#include "lib/base/cursor.h"
#include "lib/base/file.h"
#include "lib/base/result.h"
#include "lib/checkpoint/path_snapshot.h"

namespace reshard::orbax {

inline constexpr std::string_view kManifest = "manifest.ocdbt";
inline constexpr std::uint32_t kManifestMagic = 0x0cdb3a2a, kNodeMagic = 0x0cdb20de;
inline constexpr std::uint64_t kNoRoot = ~std::uint64_t{0};  // offset and length of the root of a tree without keys
inline constexpr std::size_t kEnvelopeBytes = 18;            // with a version and a compression of one byte each
inline constexpr std::size_t kMaxKeyBytes = 65'535;          // also of a path
inline constexpr Index kMaxNodeBytes = Index{256} << 20;     // decoded; orbax's own limit is 100 MB

// A file of a table, and the directory that tables of nodes in it are relative to.
struct DataFile {
  std::string path;  // relative to the database's directory; safe to open
  std::string base;
};

struct NodeReference {
  DataFile file;
  Index offset = 0, length = 0;  // bytes
  Index keys = 0;                // number of keys in it and below
  int height = 0;                // 0: a leaf
};

struct Manifest {
  bool is_numbered = false;
  std::optional<NodeReference> root;  // of the newest version; nothing if it has no keys or the manifest is numbered
};

// Parses a manifest. Fails (corrupt); `path` is for messages.
Result<Manifest> parse_manifest(Bytes bytes, const std::string& path);

// A node below another one.
struct Child {
  std::string prefix;      // of its keys, after that of the parent
  std::uint32_t file = 0;  // an index into the parent's files
  Index offset = 0, length = 0, keys = 0;
};

// A leaf's value.
struct LeafValue {
  std::string_view key;  // without the leaf's prefix; valid until the next one
  bool is_inline = false;
  std::uint32_t file = 0;  // an index into the leaf's files, unless inline
  Index offset = 0, length = 0;
  std::string_view bytes;  // bytes of an inline value
};
using OnLeafValue = std::function<Status(const LeafValue& value, const std::vector<DataFile>& files)>;

struct TreeNode {
  std::vector<DataFile> files;
  std::vector<Child> children;  // none in a leaf
  Index values = 0;             // of a leaf
};

// Parses a node of the given height. Its files are relative to `base`; `path` and `offset` are for messages. Calls
// `value` with the values of a leaf in the order of their keys; an error that it returns ends the parsing.
Result<TreeNode> parse_node(Bytes bytes, int height, const std::string& base, const std::string& path, Index offset,
                            const OnLeafValue& value);

struct Database {
  KeyValues values;
  std::vector<std::string> metadata_files;  // read to list the keys, relative to the directory
};

// Lists the keys of the newest version of the database in `directory`. Reads its nodes one after the other, checks the
// checksum of each, and asks for the memory it needs (may_take).
Result<Database> read_database(const PathSnapshot& directory, FilePool& files);

}  // namespace reshard::orbax
