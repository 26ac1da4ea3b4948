// SPDX-License-Identifier: Apache-2.0
#include "lib/output/work_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "lib/base/file.h"
#include "lib/base/names.h"
#include "lib/base/syscalls.h"
#include "lib/base/text.h"

namespace reshard {

Result<DirectoryLock> DirectoryLock::take(const std::string& path) {
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW;
  const int fd = retry([&] { return sys().open(path.c_str(), kFlags, 0); });
  if (fd < 0)
    return io_error(path + ": exists and " +
                    (errno == ENOTDIR || errno == ELOOP ? "is not a directory"
                                                        : "cannot be opened: " + std::string(std::strerror(errno))));
  DirectoryLock lock(fd);
  if (sys().flock(fd, LOCK_EX | LOCK_NB) == 0) return lock;
  if (errno == EWOULDBLOCK) return DirectoryLock(-1);
  return io_error(path + ": cannot lock: " + std::strerror(errno));
}

DirectoryLock::~DirectoryLock() {
  if (fd_ >= 0) sys().close(fd_);
}

Result<DirectoryLock> make_work(const std::string& work) {
  TRY(make_directory(work));
  Result<DirectoryLock> taken = DirectoryLock::take(work);
  if (!taken) (void)remove_directory(work);
  DirectoryLock lock = TRY(std::move(taken));
  if (!lock.is_held()) return usage_error(work + ": another reshard process is writing there");
  const auto mark = [&]() -> Status {
    TRY(File::create(path_join(work, kMarker)));
    return sync_directory(work);  // before anything else is in it
  };
  const Status marked = mark();
  if (marked) return lock;
  (void)remove_work(work);
  return marked.error();
}

Result<DirectoryLock> claim_work(const std::string& work) {
  DirectoryLock lock = TRY(DirectoryLock::take(work));
  // A run may have been killed before it made the marker; an empty directory is nobody's loss.
  const bool is_ours = TRY(path_exists(path_join(work, kMarker))) || TRY(list_tree(work)).empty();
  if (!is_ours) return usage_error(work + ": exists and was not created by reshard; move it elsewhere");
  if (!lock.is_held()) return usage_error(work + ": another reshard process is writing there");
  return lock;
}

namespace {

std::vector<std::string> journals_among(const std::vector<DirectoryEntry>& entries) {
  std::vector<std::string> out;
  const std::string prefix = std::string(kMarker) + ".";
  for (const DirectoryEntry& e : entries)
    if (!e.is_directory && e.name.starts_with(prefix)) out.push_back(e.name);
  return out;
}

}  // namespace

Result<std::vector<std::string>> journals_of_ranks(const std::string& work) {
  return journals_among(TRY(list_directory(work)));
}

namespace {

// Returns the number of hard links of a file, 0 if it does not exist.
Result<Index> names_of(const std::string& path) {
  struct stat st {};
  if (sys().fstatat(AT_FDCWD, path.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0) return static_cast<Index>(st.st_nlink);
  if (is_nothing_there()) return 0;
  return io_error(path + ": cannot stat: " + std::strerror(errno));
}

}  // namespace

Result<Leftover> read_leftover(const std::string& work, const Target& target, const std::string& facts) {
  const std::string marker = path_join(work, kMarker);
  std::optional<JournalText> text;
  if (TRY(path_exists(marker))) text = TRY(read_journal(TRY(File::open(marker))));
  // Rank 0 may have been killed before any of its slabs was recorded.
  const std::vector<std::string> others = TRY(journals_of_ranks(work));
  for (const std::string& name : others) {
    const auto other = File::open(path_join(work, name));
    if (!other) continue;
    std::optional<JournalText> more = TRY(read_journal(*other));
    if (!more) continue;
    if (!text)
      text = std::move(more);
    else if (text->cut == more->cut && text->facts == more->facts)
      (void)text->finished.add(more->finished);
  }
  if (!text || text->finished.slabs.empty()) return Leftover{std::nullopt, "no part of it was finished"};
  const auto changed = changed_facts(text->facts, facts);
  if (!changed) return Leftover{std::nullopt, "its journal is damaged"};
  if (!changed->empty()) return Leftover{std::nullopt, "these have changed: " + some_of(*changed, 5)};
  std::map<std::string, Node> inside;
  for (Node& node : TRY(list_tree(work))) inside.emplace(node.name, node);
  for (const CatalogFile& f : target.catalog().files) {
    const std::string path = path_join(work, f.path);
    const auto found = inside.find(f.path);
    if (found == inside.end() || !found->second.is_regular() || found->second.size < f.size)
      return Leftover{std::nullopt, path + " is missing or too short"};
    // Writing to it would change the other file of a hard link.
    if (TRY(names_of(path)) > 1) return Leftover{std::nullopt, path + " has another hard link"};
  }
  return Leftover{std::move(text), {}};
}

Status remove_what_is_not_data(const std::string& work, const Target& target) {
  std::set<std::string> data;  // files and the directories that contain them
  for (const CatalogFile& f : target.catalog().files)
    for (std::size_t end = 0; end != std::string::npos;) {
      end = f.path.find('/', end + 1);
      data.insert(f.path.substr(0, end));
    }
  const std::vector<Node> inside = TRY(list_tree(work));
  for (auto node = inside.rbegin(); node != inside.rend(); ++node) {
    if (data.contains(node->name) || node->name.starts_with(kMarker)) continue;
    const std::string path = path_join(work, node->name);
    TRY(node->is_directory() ? remove_directory(path) : remove_file(path));
  }
  for (const CatalogFile& f : target.catalog().files) {
    const std::string path = path_join(work, f.path);
    if (TRY(look_at(path)).size > f.size) TRY(TRY(File::open(path, File::Access::kReadWrite)).set_length(f.size));
  }
  return {};
}

Result<Index> join_journals(const std::string& work, const JournalText& text) {
  Index length = 0;
  const std::string marker = path_join(work, kMarker), next = marker + ".next";
  if (TRY(path_exists(next))) TRY(remove_file(next));
  {
    const File file = TRY(File::create(next));
    length = TRY(write_journal(file, text));
  }
  if (sys().rename(next.c_str(), marker.c_str(), 0) != 0)
    return io_error(marker + ": cannot replace: " + std::strerror(errno));
  const std::vector<std::string> others = TRY(journals_of_ranks(work));
  for (const std::string& name : others) TRY(remove_file(path_join(work, name)));
  TRY(sync_directory(work));
  return length;
}

Status remove_markers(const std::string& work) {
  const std::vector<DirectoryEntry> inside = TRY(list_directory(work));
  for (const std::string& name : journals_among(inside)) TRY(remove_file(path_join(work, name)));
  const std::string marker = path_join(work, kMarker);
  if (sys().unlink(marker.c_str()) == 0 || errno == ENOENT) return {};
  return io_error(marker + ": cannot remove: " + std::strerror(errno));
}

Status remove_work(const std::string& work) {
  for (const Node& node : TRY(list_tree(work))) {
    if (node.name == kMarker || node.name.find('/') != std::string::npos) continue;
    const std::string inner = path_join(work, node.name);
    TRY(node.is_directory() ? remove_tree(inner) : remove_file(inner));
  }
  TRY(sync_directory(work));
  TRY(remove_markers(work));
  return remove_directory(work);
}

}  // namespace reshard
