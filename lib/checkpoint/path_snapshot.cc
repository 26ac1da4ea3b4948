// SPDX-License-Identifier: Apache-2.0
#include "lib/checkpoint/path_snapshot.h"

#include <cassert>
#include <span>
#include <utility>

#include "lib/base/storage/url.h"

namespace reshard {

Result<PathSnapshot> PathSnapshot::look(std::string path) {
  PathSnapshot out;
  out.path_ = std::move(path);
  const auto self = TRY(entry_at(out.path_));
  if (!self) return out;
  out.kind_ = self->is_directory ? Kind::kDirectory : Kind::kFile;
  if (self->is_directory) {
    out.entries_ = TRY(list_directory(out.path_));
  } else {
    out.head_.resize(std::min(self->size, kHeadBytes));
    TRY(TRY(File::open(out.path_)).read_at(0, std::as_writable_bytes(std::span(out.head_))));
  }
  return out;
}

Result<const PathSnapshot*> PathSnapshot::kept(const std::string& path) const {
  std::unique_ptr<const PathSnapshot>& there = around_[path];
  if (!there) there = std::make_unique<const PathSnapshot>(TRY(look(path)));
  return there.get();
}

const DirectoryEntry* PathSnapshot::find(std::string_view name) const {
  const auto at = std::lower_bound(entries_.begin(), entries_.end(), name,
                                   [](const DirectoryEntry& e, std::string_view n) { return e.name < n; });
  return at != entries_.end() && at->name == name ? &*at : nullptr;
}

bool PathSnapshot::has_file(std::string_view name) const {
  assert(!name.starts_with('.'));
  const DirectoryEntry* const e = find(name);
  return e != nullptr && !e->is_directory;
}

Result<bool> PathSnapshot::has_hidden_file(std::string_view name) const {
  if (const DirectoryEntry* const e = find(name)) return !e->is_directory;
  if (!is_directory() || lists_hidden(path_)) return false;
  const auto there = TRY(entry_at(path_join(path_, name)));
  return there && !there->is_directory;
}

bool PathSnapshot::has_directory(std::string_view name) const {
  const DirectoryEntry* const e = find(name);
  return e != nullptr && e->is_directory;
}

Result<std::optional<std::string>> PathSnapshot::text_of(std::string_view name, Index limit) const {
  const DirectoryEntry* const e = find(name);
  const bool is_there = name.starts_with('.') ? TRY(has_hidden_file(name)) : has_file(name);
  if (!is_there || (e != nullptr && e->size > limit)) return std::optional<std::string>();
  auto text = texts_.find(name);
  if (text == texts_.end()) text = texts_.emplace(name, TRY(read_whole_file(path_join(path_, name), limit))).first;
  return std::optional(text->second);
}

}  // namespace reshard
