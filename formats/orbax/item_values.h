// SPDX-License-Identifier: Apache-2.0
// The keys and values of an item's arrays, from its database or its files.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/orbax/key_values.h"
#include "lib/base/file.h"
#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/path_snapshot.h"

namespace reshard::orbax {

// Returns `name` below a directory, which may be empty.
std::string below(const std::string& directory, std::string_view name);

// Returns all files below a directory, sorted by their paths relative to it.
Result<std::vector<DirectoryEntry>> files_in(const PathSnapshot& directory);

// The values of an item. The files that hold those asked for are added to the catalog.
class ItemValues {
 public:
  // `directory` is the item's, relative to the catalog's root. All three references must outlive this object.
  ItemValues(const PathSnapshot& place, std::string directory, Catalog& catalog, FilePool& files)
      : place_(place), directory_(std::move(directory)), catalog_(catalog), files_(files) {}

  // Reads the database, or lists the files if there is none.
  Status read();
  bool has_database() const;
  const KeyValues& all() const { return values_; }

  // Returns the extent of a value in the catalog's files.
  Result<Extent> extent(std::size_t value);
  // Returns a value of at most kMaxArrayJson bytes. `name` is for messages.
  Result<std::string> text(std::size_t value, const std::string& name);
  // Adds bytes that are in no file. They can be read after keep_memory().
  Extent add(Bytes bytes);
  // Makes values stored inside nodes, and added bytes, readable like a file.
  Status keep_memory();

  // Marks a value as used, as extent() and text() do.
  void use(std::size_t value) { used_[value] = true; }
  bool is_used(std::size_t value) const { return used_[value]; }

 private:
  std::uint32_t memory_file();

  const PathSnapshot& place_;
  const std::string directory_;
  Catalog& catalog_;
  FilePool& files_;
  KeyValues values_;
  std::vector<bool> used_;                             // by value
  std::vector<std::optional<std::uint32_t>> file_of_;  // catalog index, by the values' file
  std::optional<std::uint32_t> memory_file_;           // catalog index of the values inside nodes
  std::string memory_;                                 // its content
};

}  // namespace reshard::orbax
