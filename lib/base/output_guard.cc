// SPDX-License-Identifier: Apache-2.0
#include "lib/base/output_guard.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "lib/base/file.h"
#include "lib/base/storage/url.h"
#include "lib/base/syscalls.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr int kMostLinks = 40;  // the kernel's own limit
constexpr int kDeepest = 32;    // nested directories
constexpr Index kMostNames = 1'000'000;

struct Identity {
  std::uint64_t device = 0, inode = 0;
  bool is_directory = false;
  friend bool operator==(const Identity&, const Identity&) = default;
  friend bool operator<(const Identity& a, const Identity& b) {
    return std::tie(a.device, a.inode, a.is_directory) < std::tie(b.device, b.inode, b.is_directory);
  }
};

Error cannot_look(const std::string& path) {
  return io_error(printable(path) + ": cannot stat: " + std::strerror(errno));
}

// Returns the identity of the file that `path` leads to, or nothing if it does not exist.
// `is_found`: it is a name found in an input, where a link in a circle leads to nothing, and what this process may not
// look at it cannot read either.
Result<std::optional<Identity>> identity_of(const std::string& path, bool is_found = false) {
  struct stat st {};
  if (sys().fstatat(AT_FDCWD, path.c_str(), &st, 0) == 0)
    return std::optional(Identity{st.st_dev, st.st_ino, S_ISDIR(st.st_mode)});
  if (is_nothing_there()) return std::optional<Identity>();
  if (is_found && (errno == ELOOP || errno == EACCES)) return std::optional<Identity>();
  return cannot_look(path);
}

// Returns the path that writing to `path` would create or open: links are followed, even to a missing file.
Result<std::string> end_of_links(std::string path) {
  std::array<char, 4096> to{};
  for (int n = 0; n < kMostLinks; ++n) {
    const ssize_t length = sys().readlink(path.c_str(), to.data(), to.size());
    if (length < 0 && errno != EINVAL && !is_nothing_there()) return cannot_look(path);
    if (length <= 0) break;
    const std::string_view target(to.data(), length);
    path = target.starts_with('/') ? std::string(target) : path_join(parent_path(path), target);
  }
  return path;
}

// The identities of an output and of the directories that contain it.
class OutputIdentity {
 public:
  static Result<OutputIdentity> look(const std::string& path) {
    OutputIdentity out(path);
    if (const auto there = TRY(identity_of(path))) {
      (there->is_directory ? out.directory_ : out.file_) = *there;
      if (there->is_directory) out.around_.insert(*there);
    }
    TRY(out.add_around(parent_path(path)));
    if (const std::string end = TRY(end_of_links(path)); end != path) TRY(out.add_around(parent_path(end)));
    return out;
  }

  Result<bool> holds(const std::string& input) const { return directory_ ? is_at_or_below(input, path_) : false; }
  bool is(const Identity& input) const { return input == file_ || input == directory_; }
  bool is_in(const Identity& directory) const { return around_.contains(directory); }
  // Returns whether only comparing inodes of regular files can tell.
  bool is_file() const { return file_.has_value(); }

 private:
  explicit OutputIdentity(std::string path) : path_(std::move(path)) {}

  // Adds `directory`, or its nearest existing ancestor, and everything above it.
  Status add_around(std::string directory) {
    while (directory != "/" && directory != "." && !TRY(reshard::is_directory(directory)))
      directory = parent_path(directory);
    for (std::string at = TRY(real_path(directory)); !at.empty(); at = parent_path(at)) {
      if (const auto there = TRY(identity_of(at))) around_.insert(*there);
      if (at == "/") break;
    }
    return {};
  }

  std::string path_;
  std::optional<Identity> file_, directory_;
  std::set<Identity> around_;
};

// Searches an input directory for anything that writing the output would change.
class Search {
 public:
  explicit Search(const OutputIdentity& written) : written_(written) {}

  // The conflicting path and how the output relates to it. In directories reached by a link only files count.
  struct Found {
    std::string path;
    bool is_inside = false, is_held = false;
  };
  Result<std::optional<Found>> find(const std::string& directory, bool behind_link = false, int depth = kDeepest) {
    const auto self = TRY(identity_of(directory, true));
    if (!self || !seen_.insert(*self).second) return std::optional<Found>();
    if (depth == 0) return too_large(directory, "is nested too deeply");
    if (!behind_link && written_.is_in(*self)) return std::optional(Found{directory, true});
    std::vector<std::pair<std::string, bool>> below;  // path, and whether it is reached by a link
    for (const std::string& path : TRY(paths_in(directory))) {
      const auto there = TRY(identity_of(path, true));
      if (!there) continue;
      const auto node = TRY(node_at(path));
      const bool is_link = node && node->is_link();
      if (is_link && TRY(written_.holds(path))) return std::optional(Found{path, false, true});
      if (written_.is(*there)) return std::optional(Found{path});
      if (there->is_directory) below.emplace_back(path, behind_link || is_link);
    }
    for (const auto& [path, is_link] : below)
      if (auto found = TRY(find(path, is_link, depth - 1))) return std::optional(std::move(*found));
    return std::optional<Found>();
  }

 private:
  // Returns the paths in a directory that the output could be or could change.
  Result<std::vector<std::string>> paths_in(const std::string& directory) {
    std::vector<std::string> out;
    const std::unique_ptr<DIR, int (*)(DIR*)> open(sys().opendir(directory.c_str()), &::closedir);
    if (!open && (errno == EACCES || errno == ENOENT)) return out;
    if (!open) return cannot_look(directory);
    while (true) {
      errno = 0;
      const dirent* const entry = sys().readdir(open.get());
      if (!entry && errno != 0) return cannot_look(directory);
      if (!entry) return out;
      const std::string_view name = entry->d_name;
      if (name == "." || name == ".." || (entry->d_type == DT_REG && !written_.is_file())) continue;
      if (++names_ > kMostNames) return too_large(directory, "is one of too many directories and files");
      out.push_back(path_join(directory, name));
    }
  }

  static Error too_large(const std::string& directory, const std::string& what) {
    return unsupported(printable(directory) + ": " + what +
                       " to check that the output replaces no input; name a smaller directory as input");
  }

  const OutputIdentity& written_;
  std::set<Identity> seen_;
  Index names_ = 0;
};

}  // namespace

namespace {

// URLs have one spelling each, apart from slashes at the end.
Status check_spares_urls(const std::string& output, const std::vector<std::string>& inputs) {
  const auto text = [](const std::string& path) {
    const Url url = parse_url(path);
    return url.key.empty() ? url.root : url.root + "/" + url.key;
  };
  const std::string own = text(output);
  for (const std::string& input : inputs) {
    if (!is_url(input)) continue;
    const std::string read = text(input);
    const bool is_held = read.starts_with(own + "/"), is_inside = own.starts_with(read + "/");
    if (own != read && !is_held && !is_inside) continue;
    return usage_error(printable(own) + ": " +
                       (own == read ? "is"
                        : is_held   ? "contains"
                                    : "is inside") +
                       " " + printable(read) + ", which this job reads; choose a place outside it");
  }
  return {};
}

}  // namespace

Status check_spares_inputs(const std::string& output, const std::vector<std::string>& inputs) {
  if (is_url(output)) return check_spares_urls(output, inputs);
  const OutputIdentity written = TRY(OutputIdentity::look(output));
  const auto refused = [&](const std::string& how, const std::string& input, const std::string& advice) {
    return usage_error(printable(output) + ": " + how + " " + printable(input) + ", which this job reads; " + advice);
  };
  const std::string kept = "it will not be replaced";
  for (const std::string& input : inputs) {
    const auto there = input.empty() ? std::nullopt : TRY(identity_of(input));
    if (!there) continue;
    if (written.is(*there)) return refused("is", input, kept);
    if (TRY(written.holds(input))) return refused("contains", input, kept);
    if (!there->is_directory) continue;
    const auto found = TRY(Search(written).find(input));
    if (!found) continue;
    if (found->is_inside) return refused("is inside", input, "choose a place outside it");
    return refused(found->is_held ? "contains" : "is", found->path, kept);
  }
  return {};
}

}  // namespace reshard
