// SPDX-License-Identifier: Apache-2.0
#include "tools/confine.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/sandbox.h"
#include "lib/base/storage/http.h"
#include "lib/base/storage/role_credentials.h"
#include "lib/base/storage/storage.h"
#include "lib/base/syscalls.h"
#include "tools/commands.h"
#include "tools/job_options.h"

namespace reshard::tools {
namespace {

constexpr int kDeepest = 16;
constexpr int kMostNames = 50'000;

// Throws bad_alloc if a system call failed for lack of memory, because a path that was skipped would be refused later.
void check_memory() {
  if (errno == ENOMEM) throw std::bad_alloc();
}

class Paths {
 public:
  // Adds the paths that a value on the command line may name.
  void name(const std::string& word) {
    if (real(word).empty()) return;
    for (const std::string& path : {word, real(word)}) {
      // Formats look for files of a checkpoint next to it and above it.
      const std::string home = answer(is_directory(path)) ? path : parent_path(path);
      if (home != path) around(home);
      around(parent_path(home));
      around(home + "/..");
    }
    read(word);
  }

  void write(const std::string& word) {
    if (answer(path_exists(word))) sandbox_.written.push_back(word);  // a file, a pipe, a device
    std::string place = parent_path(word);
    while (!answer(is_directory(place)) && place != "/" && place != ".") place = parent_path(place);
    sandbox_.written.push_back(place);
  }

  // Prepares a URL: reads now what is read only once, and allows what reading it needs later. Ignores errors, because
  // the command reports them too.
  void reach(const std::string& url) {
    (void)prepare_stored(url);
    for (std::string& file : token_files()) sandbox_.read.push_back(std::move(file));
    for (std::string& file : http_files()) sandbox_.read.push_back(std::move(file));
    sandbox_.network = true;
  }

  void system() {
    for (const char* path : {"/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/proc/self",
                             "/sys/devices/system/cpu", "/dev/urandom"})
      sandbox_.read.emplace_back(path);
    sandbox_.written.emplace_back("/dev/null");
    sandbox_.written.push_back(temporary_directory());
  }

  // Returns the sandbox, or why a path could not be looked at. If there were too many names to look through, everything
  // may be read.
  Result<Sandbox> sandbox() && {
    if (failure_) return std::move(*failure_);
    if (names_ > kMostNames) everything();
    return std::move(sandbox_);
  }
  void everything() { sandbox_.read.emplace_back("/"); }

 private:
  // Returns an answer about a path. A failure is kept, except of a word that is no path or that the command may not
  // look at either.
  template <class T>
  T answer(Result<T> got) {
    if (got.has_value()) return *std::move(got);
    check_memory();
    if (errno != ENAMETOOLONG && errno != ELOOP && errno != EACCES && !failure_) failure_ = std::move(got).error();
    return T();
  }

  // Returns the absolute path without links; empty if the path does not exist.
  std::string real(const std::string& path) { return answer(real_path(path)); }

  void read(const std::string& path) {
    sandbox_.read.push_back(path);
    follow_links(real(path), kDeepest);
  }

  // Adds a directory that was not named: without hidden files, and of the root only files. Links are followed only if
  // their names look like files, because others may lead to an unreachable network mount.
  void around(const std::string& directory) {
    const std::string at = real(directory);
    if (at.empty() || !looked_around_.insert(at).second) return;
    bool is_whole = at != "/";
    std::vector<std::string> inside, links;
    for_each_name(at, [&](const std::string& name, unsigned char kind) {
      const bool is_hidden = name.starts_with(".");
      is_whole = is_whole && !is_hidden;
      if (is_hidden || (at == "/" && kind != DT_REG)) return;
      const std::string path = path_join(at, name);
      if (kind != DT_LNK)
        inside.push_back(path);
      else if (name.find('.') != std::string::npos)
        links.push_back(path);
    });
    if (is_whole) inside = {at};
    sandbox_.listed.push_back(at);
    sandbox_.read.insert(sandbox_.read.end(), inside.begin(), inside.end());
    sandbox_.read.insert(sandbox_.read.end(), links.begin(), links.end());
  }

  // Adds the targets of a directory's links, such as the files of a Hugging Face snapshot.
  void follow_links(const std::string& directory, int depth) {
    if (directory.empty() || depth == 0 || !answer(is_directory(directory)) || !followed_.insert(directory).second)
      return;
    for_each_name(directory, [&](const std::string& name, unsigned char kind) {
      const std::string path = path_join(directory, name);
      if (kind == DT_DIR) follow_links(path, depth - 1);
      if (kind != DT_LNK) return;
      sandbox_.read.push_back(path);
      follow_links(real(path), depth - 1);
    });
  }

  template <class Each>
  void for_each_name(const std::string& directory, Each each) {
    DIR* const open = sys().opendir(directory.c_str());
    if (!open) return check_memory();
    std::vector<std::pair<std::string, unsigned char>> names;  // closes this directory before others are opened
    while (const dirent* entry = sys().readdir(open)) {
      const std::string name = entry->d_name;
      if (name == "." || name == "..") continue;
      if (++names_ > kMostNames) break;
      unsigned char kind = entry->d_type;
      struct stat s {};
      if (kind == DT_UNKNOWN &&
          sys().fstatat(AT_FDCWD, path_join(directory, name).c_str(), &s, AT_SYMLINK_NOFOLLOW) == 0)
        kind = IFTODT(s.st_mode);
      names.emplace_back(name, kind);
    }
    ::closedir(open);
    for (const auto& [name, kind] : names) each(name, kind);
  }

  Sandbox sandbox_;
  std::optional<Error> failure_;
  std::set<std::string> followed_, looked_around_;
  int names_ = 0;
};

// An HDF5 file may name external data files, and a manifest names its sources.
bool names_further_files(const std::string& option, const std::vector<std::string>& values) {
  return option == "--lineage" ||
         (option == "--allow" && std::find(values.begin(), values.end(), "external") != values.end());
}

}  // namespace

Status confine_to(const ParsedLine& line) {
  Paths paths;
  paths.system();
  const auto name = [&](const std::string& word) { is_url(word) ? paths.reach(word) : paths.name(word); };
  for (const auto& [option, values] : line.values) {
    if (names_further_files(option, values)) paths.everything();
    for (const std::string& value : values) {
      name(value);
      if (const std::size_t equals = value.find('='); equals != std::string::npos) name(value.substr(equals + 1));
    }
  }
  for (const std::string& word : line.written)
    if (!is_url(word)) paths.write(word);
  TRY(enter_sandbox(TRY(std::move(paths).sandbox())));
  return {};
}

}  // namespace reshard::tools
