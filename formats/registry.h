// SPDX-License-Identifier: Apache-2.0
// The table of formats. Adding one is one directory and one row in registry.cc.
#pragma once

#include <string_view>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

// Rows, in the order in which a path is tried.
class FormatTable {
 public:
  explicit FormatTable(std::vector<const Format*> rows) : rows_(std::move(rows)) {}
  // A row of a program's own, before it opens or writes anything.
  void add(const Format& format) { rows_.push_back(&format); }

  auto begin() const { return rows_.begin(); }
  auto end() const { return rows_.end(); }

 private:
  std::vector<const Format*> rows_;
};
FormatTable& formats();

// The format of that name; a usage error that lists those that can be written.
Result<const Format*> find_format(std::string_view name);

// Returns the format that recognises a path; null if none does.
Result<const Format*> recognised_format(const PathSnapshot& place);

}  // namespace reshard
