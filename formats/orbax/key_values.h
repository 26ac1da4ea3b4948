// SPDX-License-Identifier: Apache-2.0
// The keys and values of a checkpoint: those of an OCDBT database, or files by their paths.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"

namespace reshard::orbax {

// Values sorted by key. Each is an extent of a file, or of memory if it is stored inside a node.
class KeyValues {
 public:
  static constexpr std::uint32_t kInline = ~std::uint32_t{0};  // Extent::file of a value in memory
  static constexpr Index kMaxKeys = Index{1} << 26;
  static constexpr std::size_t kMaxKeyBytes = std::size_t{4} << 30;  // of all keys

  // The files of the values, relative to the checkpoint's directory. Extents refer to them by index.
  std::vector<std::string> files;

  std::size_t size() const { return entries_.size(); }
  std::string_view key(std::size_t i) const {
    return std::string_view(keys_).substr(entries_[i].key, entries_[i].key_length);
  }
  const Extent& extent(std::size_t i) const { return entries_[i].extent; }
  // Returns the bytes of all values in memory, which their extents refer to.
  const std::string& inline_bytes() const { return inline_; }

  // Appends a value and asks for its memory (may_take). Fails (corrupt) if keys do not ascend or are too many.
  Status add(std::string_view key, const Extent& extent);
  Status add_inline(std::string_view key, std::string_view value);
  // Returns the value of a key; nothing if there is none.
  std::optional<std::size_t> find(std::string_view wanted) const;

 private:
  struct Entry {
    std::size_t key = 0;  // its offset in keys_
    std::uint32_t key_length = 0;
    Extent extent;
  };
  Status ask_for(std::size_t bytes);

  std::string keys_, inline_;
  std::vector<Entry> entries_;
  Index unasked_ = 0;  // bytes added since the last call of may_take()
};

}  // namespace reshard::orbax
