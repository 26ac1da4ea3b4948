// SPDX-License-Identifier: Apache-2.0
// The table of formats. Adding one is one directory and one row in registry.cc.
#pragma once

#include <string_view>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

// The rows, in the order in which they are tried on a path.
class FormatTable {
 public:
  explicit FormatTable(std::vector<const Format*> rows) : rows_(std::move(rows)) {}
  // Adds a program's own row. Call it before anything is opened or written.
  void add(const Format& format) { rows_.push_back(&format); }

  auto begin() const { return rows_.begin(); }
  auto end() const { return rows_.end(); }

 private:
  std::vector<const Format*> rows_;
};
FormatTable& formats();

// Returns the formats that can be written, in the order in which help and messages list them.
std::vector<const Format*> written_formats();

// Returns the format with this name, or a usage error that lists the formats that can be written.
Result<const Format*> find_format(std::string_view name);

// Returns the format that recognises a path; null if none does.
Result<const Format*> recognised_format(const PathSnapshot& place);

}  // namespace reshard
