// What stands at a path, looked at once: what formats recognise a checkpoint by, and find its files with.
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

// What is asked of it is kept: of a directory inside, the one above and a file's text the second answer is the first,
// whatever has changed since. Not for several threads at once.
class PathSnapshot {
 public:
  // A directory is listed, of a file the first bytes are read; there may be nothing. An error where that fails: then no
  // format can say that this is none of its checkpoints.
  static Result<PathSnapshot> look(std::string path);
  // What is at a name in it, and the directory that it is in; they live as long as this one.
  Result<const PathSnapshot*> inside(std::string_view name) const { return kept(path_join(path_, name)); }
  Result<const PathSnapshot*> parent() const { return kept(parent_path(path_)); }
  // The directory that it is, or that it is in.
  Result<const PathSnapshot*> directory() const { return is_directory() ? this : parent(); }

  const std::string& path() const { return path_; }
  std::string name() const { return base_name(path_); }
  bool is_there() const { return kind_ != Kind::kNothing; }
  bool is_directory() const { return kind_ == Kind::kDirectory; }
  bool is_file() const { return kind_ == Kind::kFile; }

  // A directory's, as list_directory() has them.
  const std::vector<DirectoryEntry>& entries() const { return entries_; }
  bool has_file(std::string_view name) const;
  bool has_directory(std::string_view name) const;
  // Whether any file in it has a name like that.
  template <class IsOne>
  bool has_file_like(IsOne&& is_one) const {
    return std::any_of(entries_.begin(), entries_.end(),
                       [&](const DirectoryEntry& e) { return !e.is_directory && is_one(e.name); });
  }
  // The text of a file in it; nothing where there is none, or a longer one.
  Result<std::optional<std::string>> text_of(std::string_view name, Index limit) const;

  // A file's first bytes: kHeadBytes, or all of a shorter one.
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
