// SPDX-License-Identifier: Apache-2.0
// Writes an OCDBT database (ocdbt.h) in one pass over its keys: nodes that are not compressed, in one file, and a
// manifest of one version.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"

namespace reshard::orbax {

// A node that was written.
struct WrittenNode {
  std::string first_key;
  Index offset = 0, length = 0;  // in the file of nodes
  // Counts for itself and all nodes below it: keys, bytes of nodes, bytes of values outside nodes.
  Index keys = 0, tree_bytes = 0, value_bytes = 0;
  int height = 0;
};

class DatabaseWriter {
 public:
  // Receives the bytes of the file of nodes, from its beginning on.
  using Emit = std::function<Status(std::string_view bytes)>;

  // `files` contain the values and `nodes_file` the nodes; paths are relative to the database's directory. `files` must
  // outlive the writer.
  DatabaseWriter(std::span<const CatalogFile> files, std::string nodes_file, Emit emit);

  // Adds a value. Keys must be added in ascending order of their bytes, and have at most 65,535 bytes.
  Status add(std::string_view key, const Extent& value);  // its file is an index into `files`
  Status add_inline(std::string_view key, std::string_view value);

  // Writes the remaining nodes and returns the manifest's bytes.
  Result<std::string> finish();

 private:
  // The columns of the current leaf.
  struct Leaf {
    std::string prefixes, suffix_lengths, suffixes, lengths, kinds, file_numbers, offsets, values;
    std::vector<std::uint32_t> files;                // of its values, as indices into files_
    std::map<std::uint32_t, std::uint64_t> numbers;  // of these in the leaf's table
    std::string first_key, last_key;
    Index keys = 0, value_bytes = 0;

    std::size_t bytes() const {
      return prefixes.size() + suffix_lengths.size() + suffixes.size() + lengths.size() + kinds.size() +
             file_numbers.size() + offsets.size() + values.size();
    }
  };

  Status add_key(std::string_view key);
  Status end_leaf();
  Status write_node(std::string_view body, WrittenNode node, std::vector<WrittenNode>& level);
  Result<std::vector<WrittenNode>> write_parents(const std::vector<WrittenNode>& children);

  std::span<const CatalogFile> files_;
  const std::string nodes_file_;
  const Emit emit_;
  Leaf leaf_;
  std::vector<WrittenNode> leaves_;
  Index size_ = 0;  // of the file of nodes so far
};

}  // namespace reshard::orbax
