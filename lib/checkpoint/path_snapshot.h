// SPDX-License-Identifier: Apache-2.0
// A snapshot of a path, taken once, from which all formats recognise a checkpoint and find its files.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/file.h"

namespace reshard {

// Every answer is cached: asking again about a directory or a file's text returns the first answer, even if the disk
// has changed since. Not thread-safe.
class PathSnapshot {
 public:
  // Lists a directory, or reads the first bytes of a file; the path may also not exist. A failure is an error, because
  // then no format can rule out that the path is one of its checkpoints.
  static Result<PathSnapshot> look(std::string path);
  // Return the snapshot of a name inside, and of the parent directory. Valid as long as this object.
  Result<const PathSnapshot*> inside(std::string_view name) const { return kept(path_join(path_, name)); }
  Result<const PathSnapshot*> parent() const { return kept(parent_path(path_)); }
  // Returns this snapshot if it is a directory, otherwise the parent's.
  Result<const PathSnapshot*> directory() const { return is_directory() ? this : parent(); }

  const std::string& path() const { return path_; }
  std::string name() const { return base_name(path_); }
  bool is_there() const { return kind_ != Kind::kNothing; }
  bool is_directory() const { return kind_ == Kind::kDirectory; }
  bool is_file() const { return kind_ == Kind::kFile; }

  // Returns the entries of a directory, as list_directory() does.
  const std::vector<DirectoryEntry>& entries() const { return entries_; }
  // Returns whether a file of this name is listed. The name must not begin with a dot.
  bool has_file(std::string_view name) const;
  // Returns the same of a name that begins with a dot: looks it up if listings leave such names out.
  Result<bool> has_hidden_file(std::string_view name) const;
  bool has_directory(std::string_view name) const;
  // Returns whether any file in it has a name for which `is_one` is true.
  template <class IsOne>
  bool has_file_like(IsOne&& is_one) const {
    return std::any_of(entries_.begin(), entries_.end(),
                       [&](const DirectoryEntry& e) { return !e.is_directory && is_one(e.name); });
  }
  // Returns the text of a file inside, or nothing if it is missing or longer than `limit`.
  Result<std::optional<std::string>> text_of(std::string_view name, Index limit) const;

  // The first bytes of a file: kHeadBytes, or all of a shorter one.
  static constexpr Index kHeadBytes = 520;
  const std::string& head() const { return head_; }

 private:
  enum class Kind { kNothing, kFile, kDirectory };
  const DirectoryEntry* find(std::string_view name) const;
  Result<const PathSnapshot*> kept(const std::string& path) const;

  std::string path_;
  Kind kind_ = Kind::kNothing;
  std::vector<DirectoryEntry> entries_;
  std::string head_;
  mutable std::map<std::string, std::unique_ptr<const PathSnapshot>> around_;  // by path
  mutable std::map<std::string, std::string, std::less<>> texts_;              // by name
};

}  // namespace reshard
