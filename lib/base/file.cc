// SPDX-License-Identifier: Apache-2.0
#include "lib/base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "lib/base/io_failure_watch.h"
#include "lib/base/memory_limit.h"
#include "lib/base/sandbox.h"
#include "lib/base/storage/storage.h"
#include "lib/base/syscalls.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

Error errno_error(const std::string& path, std::string_view what) {
  const bool is_denied = errno == EACCES || errno == EPERM;
  if (is_denied) ++access_denials;
  if (!is_denied && !is_nothing_there() && errno != ELOOP) ++io_failures;
  const bool may_be_ours = errno == EACCES && in_sandbox();
  return io_error(path + ": " + std::string(what) + ": " + std::strerror(errno) +
                  (may_be_ours       ? "; if other programs can open it, try --no-sandbox"
                   : errno == EMFILE ? "; raise the limit (ulimit -n)"
                                     : ""));
}

// Returns a name that no other process or thread chooses, also if a killed one left its file.
std::string temporary_name(const std::string& prefix) {
  std::random_device random;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%08x%08x", random(), random());
  return prefix + digits;
}

}  // namespace

Result<File> File::open(const std::string& path, Access access) {
  if (is_url(path)) {
    if (access != Access::kRead) return unsupported(path + ": cannot be opened for writing: it is a URL");
    File file(-1, path);
    file.stored_ = TRY(StoredFile::open(path));
    return file;
  }
  const int mode = access == Access::kRead ? O_RDONLY : access == Access::kReadWrite ? O_RDWR : O_WRONLY | O_DIRECT;
  const int flags = mode | O_CLOEXEC | O_NONBLOCK;
  const int fd = retry([&] { return sys().open(path.c_str(), flags, 0); });
  if (fd < 0) return errno_error(path, "cannot open");
  File file(fd, path);
  struct stat st {};
  if (sys().fstat(fd, &st) != 0) return errno_error(path, "cannot stat");
  if (!S_ISREG(st.st_mode)) return io_error(path + ": expected a regular file");
  return file;
}

Result<File> File::create(const std::string& path) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const int fd = retry([&] { return sys().open(path.c_str(), kFlags, 0666); });
  if (fd < 0) return errno_error(path, "cannot create");
  return File(fd, path);
}

Result<File> File::create_anonymous(const std::string& directory) {
  const int fd = retry([&] { return sys().open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600); });
  if (fd >= 0) return File(fd, directory + "/(temporary)");
  // Not every file system supports O_TMPFILE: create a file and unlink it.
  const std::string path = temporary_name(directory + "/.reshard-temporary-");
  File file = TRY(create(path));
  if (sys().unlink(path.c_str()) != 0) return errno_error(path, "cannot unlink");
  return file;
}

Result<File> File::create_in_memory() {
  const std::string path = "(memory)";
  const int fd = ::memfd_create("reshard", MFD_CLOEXEC);
  if (fd < 0) return errno_error(path, "cannot create");
  return File(fd, path);
}

Result<File> File::reopen_direct() const {
  if (stored_) return unsupported(path_ + ": is not on this machine");
  const std::string link = "/proc/self/fd/" + std::to_string(fd_);
  const int fd = retry([&] { return sys().open(link.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC, 0); });
  if (fd < 0) return errno_error(path_, "cannot open for direct reading");
  return File(fd, path_);
}

File::File(File&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)), stored_(std::move(other.stored_)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(stored_, other.stored_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) sys().close(fd_);
}

Result<Index> File::size() const {
  if (stored_) return stored_->size();
  struct stat st {};
  if (sys().fstat(fd_, &st) != 0) return errno_error(path_, "cannot stat");
  return st.st_size;
}

Status File::read_at(Index offset, MutableBytes out) const {
  if (stored_) return stored_->read_at(offset, out);
  std::size_t done = 0;
  while (done < out.size()) {
    const off_t where = offset + static_cast<off_t>(done);
    const ssize_t n = retry([&] { return sys().pread(fd_, out.data() + done, out.size() - done, where); });
    if (n < 0) return errno_error(at(path_, where), "cannot read");
    if (n == 0)
      return corrupt(at(path_, offset) + ": expected " + bytes_of(std::ssize(out)) + ", got " + std::to_string(done) +
                     " before the end of the file");
    done += n;
  }
  return {};
}

Status File::write_at(Index offset, Bytes data) const {
  std::size_t done = 0;
  while (done < data.size()) {
    const off_t where = offset + static_cast<off_t>(done);
    const ssize_t n = retry([&] { return sys().pwrite(fd_, data.data() + done, data.size() - done, where); });
    if (n < 0) return errno_error(at(path_, where), "cannot write");
    if (n == 0) return io_error(at(path_, where) + ": cannot write: no progress");
    done += n;
  }
  return {};
}

void File::expect(Reads reads) const {
  if (stored_) return;
  (void)::posix_fadvise(fd_, 0, 0, reads == Reads::kScattered ? POSIX_FADV_RANDOM : POSIX_FADV_NORMAL);
}

Status File::allocate(Index length) const {
  if (length > 0 && retry([&] { return sys().fallocate(fd_, 0, 0, length); }) == 0) return {};
  if (length > 0 && errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL)
    return errno_error(path_, "cannot reserve " + bytes_of(length));
  return set_length(length);
}

Status File::set_length(Index length) const {
  if (retry([&] { return sys().ftruncate(fd_, length); }) != 0) return errno_error(path_, "cannot set the length");
  return {};
}

Status File::sync_data() const {
  if (retry([&] { return sys().fdatasync(fd_); }) != 0) return errno_error(path_, "cannot write to disk");
  return {};
}

Status File::close() {
  if (fd_ >= 0 && sys().close(std::exchange(fd_, -1)) != 0 && errno != EINTR) return errno_error(path_, "cannot close");
  return {};
}

Result<std::string> read_whole_file(const std::string& path, Index limit) {
  const File file = TRY(File::open(path));
  const Index size = TRY(file.size());
  if (size > limit) return corrupt(path + ": expected at most " + bytes_of(limit) + ", got " + std::to_string(size));
  TRY(may_take(size, [&] { return path; }));
  std::string out(size, '\0');
  TRY(file.read_at(0, {reinterpret_cast<std::byte*>(out.data()), out.size()}));
  return out;
}

Result<std::string> read_file_start(const std::string& path, Index length) {
  const File file = TRY(File::open(path));
  const Index size = std::min(length, TRY(file.size()));
  TRY(may_take(size, [&] { return path; }));
  std::string out(size, '\0');
  TRY(file.read_at(0, {reinterpret_cast<std::byte*>(out.data()), out.size()}));
  return out;
}

namespace {

// Writes to the existing file, pipe or device, which is not replaced.
Status write_through(const std::string& path, std::string_view text) {
  const int fd =
      retry([&] { return sys().open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOCTTY | O_CLOEXEC, 0666); });
  if (fd < 0) return errno_error(path, "cannot open");
  Status status;
  while (status && !text.empty()) {
    const ssize_t n = retry([&] { return sys().write(fd, text.data(), text.size()); });
    if (n < 0) status = errno_error(path, "cannot write");
    text.remove_prefix(std::max<ssize_t>(0, n));
  }
  if (sys().close(fd) != 0 && status && errno != EINTR) status = errno_error(path, "cannot close");
  return status;
}

// Returns the sorted names in an open directory, without "." and "..".
Result<std::vector<std::string>> names_in(DIR* directory, const std::string& path) {
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const dirent* entry = sys().readdir(directory);
    if (entry == nullptr && errno != 0) return errno_error(path, "cannot list");
    if (entry == nullptr) break;
    if (const std::string_view name = entry->d_name; name != "." && name != "..") names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

struct CloseDirectory {
  void operator()(DIR* directory) const { ::closedir(directory); }
};
using Directory = std::unique_ptr<DIR, CloseDirectory>;

// Opens the directory `path` itself, not the target of a link.
Result<Directory> open_directory(const std::string& path) {
  const std::string unslashed = without_end_slashes(path);  // "link/" would follow the link
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  const int fd = retry([&] { return sys().open(unslashed.c_str(), kFlags, 0); });
  Directory directory(fd < 0 ? nullptr : ::fdopendir(fd));
  if (directory) return directory;
  Error error = errno_error(path, "cannot list");
  if (fd >= 0) sys().close(fd);
  return error;
}

}  // namespace

Status check_can_replace(const std::string& path) {
  if (const auto there = TRY(node_at(path)); there && !there->is_regular()) return {};
  const std::string temporary = temporary_name(path + ".partial-");
  TRY(TRY(File::create(temporary)).close());
  return remove_file(temporary);
}

Status replace_file(const std::string& path, std::string_view text, bool replace) {
  if (const auto there = TRY(node_at(path)); replace && there && !there->is_regular()) return write_through(path, text);
  const std::string temporary = temporary_name(path + ".partial-");
  File file = TRY(File::create(temporary));
  const auto put = [&]() -> Status {
    TRY(file.write_at(0, {reinterpret_cast<const std::byte*>(text.data()), text.size()}));
    TRY(file.sync_data());
    TRY(file.close());
    if (!replace) TRY(rename_no_replace(temporary, path));
    if (replace && sys().rename(temporary.c_str(), path.c_str(), 0) != 0) return errno_error(path, "cannot replace");
    return sync_directory(parent_path(path));
  };
  Status status = put();
  if (!status) sys().unlink(temporary.c_str());
  return status;
}

namespace {
DirectoryEntry entry_of(const std::string& name, const struct stat& st) {
  return {name, S_ISDIR(st.st_mode), S_ISREG(st.st_mode) ? static_cast<Index>(st.st_size) : 0,
          static_cast<Index>(st.st_mtim.tv_sec) * 1'000'000'000 + st.st_mtim.tv_nsec};
}

// Fills `out`; returns whether there is something to describe.
Result<bool> stat_at(const std::string& path, int flags, struct stat& out) {
  if (sys().fstatat(AT_FDCWD, path.c_str(), &out, flags) == 0) return true;
  if (is_nothing_there()) return false;
  return errno_error(path, "cannot stat");
}
}  // namespace

Result<std::vector<DirectoryEntry>> list_directory(const std::string& path) {
  if (is_url(path)) return list_stored(path);
  const Directory directory(sys().opendir(path.c_str()));
  if (!directory) return errno_error(path, "cannot list");
  const int fd = ::dirfd(directory.get());
  std::vector<DirectoryEntry> out;
  for (const std::string& name : TRY(names_in(directory.get(), path))) {
    struct stat st {};
    if (sys().fstatat(fd, name.c_str(), &st, 0) != 0) {
      const Error error = errno_error(path_join(path, name), "cannot stat");
      const bool leads_nowhere = errno == ENOENT || errno == ELOOP || errno == ENOTDIR || errno == EACCES;
      const bool is_there = sys().fstatat(fd, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0;
      if (leads_nowhere && (is_there ? S_ISLNK(st.st_mode) : errno == ENOENT)) continue;
      return error;
    }
    if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) continue;
    out.push_back(entry_of(name, st));
  }
  return out;
}

Result<bool> may_be_listed(const std::string& directory) {
  if (is_url(directory) || Directory(sys().opendir(directory.c_str()))) return true;
  if (errno == EACCES) return false;
  return errno_error(directory, "cannot list");
}

Result<std::optional<DirectoryEntry>> entry_at(const std::string& path) {
  if (is_url(path)) {
    const auto object = TRY(find_stored(path));
    return object ? std::optional(object->entry) : std::nullopt;
  }
  struct stat st {};
  if (!TRY(stat_at(path, 0, st))) return std::optional<DirectoryEntry>();
  if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) return std::optional<DirectoryEntry>();
  return std::optional(entry_of(base_name(path), st));
}

bool Node::is_directory() const { return S_ISDIR(mode); }
bool Node::is_regular() const { return S_ISREG(mode); }
bool Node::is_link() const { return S_ISLNK(mode); }

namespace {

// Of a URL: its version takes the inode's place.
Result<std::optional<Node>> stored_node_at(const std::string& path) {
  const auto object = TRY(find_stored(path));
  if (!object) return std::optional<Node>();
  Node node{"", 0, std::hash<std::string>()(object->version), 0};
  node.mode = object->entry.is_directory ? S_IFDIR | 0555 : S_IFREG | 0444;
  node.size = object->entry.size;
  node.mtime_ns = object->entry.mtime_ns;
  return std::optional(node);
}

// Returns the sorted names in a directory, without following links.
Result<std::vector<std::string>> names_below(const std::string& directory) {
  if (!is_url(directory)) return names_in(TRY(open_directory(directory)).get(), directory);
  std::vector<std::string> out;
  for (const DirectoryEntry& entry : TRY(list_stored(directory))) out.push_back(entry.name);
  return out;
}

}  // namespace

Result<std::optional<Node>> node_at(const std::string& path) {
  if (is_url(path)) return stored_node_at(path);
  struct stat st {};
  if (!TRY(stat_at(path, AT_SYMLINK_NOFOLLOW, st))) return std::optional<Node>();
  Node node{"", st.st_dev, st.st_ino, st.st_mode};
  if (node.is_directory()) return std::optional(node);
  node.size = st.st_size;
  node.mtime_ns = static_cast<Index>(st.st_mtim.tv_sec) * 1'000'000'000 + st.st_mtim.tv_nsec;
  return std::optional(node);
}

Result<Node> look_at(const std::string& path) {
  if (auto node = TRY(node_at(path))) return std::move(*node);
  return io_error(path + ": cannot stat: " + (is_url(path) ? "not found" : std::strerror(ENOENT)));
}

Result<std::vector<Node>> list_tree(const std::string& directory) {
  std::vector<Node> out;
  for (const std::string& name : TRY(names_below(directory))) {
    const std::string path = path_join(directory, name);
    Node node = TRY(look_at(path));
    node.name = name;
    const bool is_directory = node.is_directory();
    out.push_back(std::move(node));
    if (!is_directory) continue;
    for (Node& inner : TRY(list_tree(path))) {
      inner.name = path_join(name, inner.name);
      out.push_back(std::move(inner));
    }
  }
  return out;
}

Result<bool> is_at_or_below(const std::string& path, const std::string& directory) {
  if (is_url(path) || is_url(directory)) return is_url(path) && (path + "/").starts_with(path_join(directory, ""));
  struct stat st {
  }, wanted{};
  std::string at = TRY(real_path(path));
  if (at.empty() || !TRY(stat_at(directory, 0, wanted))) return false;
  while (true) {
    if (TRY(stat_at(at, 0, st)) && st.st_dev == wanted.st_dev && st.st_ino == wanted.st_ino) return true;
    if (at == "/") return false;
    at = parent_path(at);
  }
}

Result<bool> path_exists(const std::string& path) { return TRY(node_at(path)).has_value(); }

Result<bool> is_directory(const std::string& path) {
  const auto entry = TRY(entry_at(path));
  return entry && entry->is_directory;
}

std::string path_join(std::string_view directory, std::string_view name) {
  std::string out(directory);
  if (!out.empty() && out.back() != '/') out += '/';
  return out.append(name);
}

std::string parent_path(const std::string& path) {
  if (is_url(path)) {
    const Url url = parse_url(path);
    const std::size_t last = url.key.rfind('/');
    return last == std::string::npos ? url.root : url.root + "/" + url.key.substr(0, last);
  }
  const std::string p = without_end_slashes(path);
  const std::size_t slash = p.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : p.substr(0, slash);
}

std::string without_end_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string base_name(const std::string& path) {
  const std::string p = without_end_slashes(path);
  return p.substr(p.rfind('/') + 1);  // npos + 1 is 0
}

Result<std::string> real_path(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(sys().realpath(path.c_str(), nullptr), &std::free);
  if (real) return std::string(real.get());
  if (is_nothing_there()) return std::string();
  return errno_error(path, "cannot resolve");
}

Result<std::string> by_own_name(const std::string& path) {
  const std::string last = base_name(path);
  if (last != "." && last != "..") return path;
  const std::string real = TRY(real_path(path));
  return real.empty() ? path : real;
}

Result<bool> is_mount_point(const std::string& path) {
  constexpr std::uint64_t kMountRoot = 0x2000;  // STATX_ATTR_MOUNT_ROOT, since Linux 5.8
  struct statx st {};
  if (sys().statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_TYPE, &st) == 0)
    return (st.stx_attributes & kMountRoot) != 0;
  // Some containers refuse this call; a rename to a mount point fails anyway, with a worse message.
  if (is_nothing_there() || errno == EPERM || errno == ENOSYS) return false;
  return errno_error(path, "cannot stat");
}

Status make_directory(const std::string& path) {
  if (sys().mkdir(path.c_str(), 0777) != 0)
    return errno_error(
        path, errno == ENOENT ? "cannot create the directory in " + parent_path(path) : "cannot create the directory");
  return {};
}

Status remove_file(const std::string& path) {
  if (sys().unlink(path.c_str()) != 0) return errno_error(path, "cannot remove");
  return {};
}

Status rename_no_replace(const std::string& from, const std::string& to) {
  if (sys().rename(from.c_str(), to.c_str(), RENAME_NOREPLACE) == 0) return {};
  // The file system, for example NFS, does not support the flag. A hard link never replaces an existing name.
  if (errno == EINVAL) {
    if (!TRY(is_directory(from)) && sys().link(from.c_str(), to.c_str()) == 0) {
      const Status removed = remove_file(from);
      if (!removed) sys().unlink(to.c_str());  // what is reported as failed must not be there
      return removed;
    }
    if (TRY(path_exists(to)))
      errno = EEXIST;
    else if (sys().rename(from.c_str(), to.c_str(), 0) == 0)
      return {};
  }
  return errno_error(to, "cannot move the finished output into place");
}

Status exchange_paths(const std::string& a, const std::string& b) {
  if (sys().rename(a.c_str(), b.c_str(), RENAME_EXCHANGE) != 0) return errno_error(b, "cannot exchange with " + a);
  return {};
}

Status sync_directory(const std::string& path) {
  const int fd = retry([&] { return sys().open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0); });
  if (fd < 0) return errno_error(path, "cannot open");
  Status status;
  if (retry([&] { return sys().fsync(fd); }) != 0) status = errno_error(path, "cannot write to disk");
  sys().close(fd);
  return status;
}

Status remove_directory(const std::string& path) {
  if (sys().rmdir(path.c_str()) != 0) return errno_error(path, "cannot remove");
  return {};
}

Status remove_tree(const std::string& path) {
  for (const std::string& name : TRY(names_in(TRY(open_directory(path)).get(), path))) {
    const std::string child = path_join(path, name);
    if (const auto node = TRY(node_at(child))) TRY(node->is_directory() ? remove_tree(child) : remove_file(child));
  }
  return remove_directory(path);
}

Result<Index> free_space(const std::string& path) {
  struct statvfs st {};
  if (::statvfs(path.c_str(), &st) != 0) return errno_error(path, "cannot query the free space");
  return static_cast<Index>(st.f_bavail) * static_cast<Index>(st.f_frsize);
}

void raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

OpenFiles& OpenFiles::of_process() {
  static OpenFiles* const all = [] {  // never destroyed: pools may outlive static objects
    constexpr rlim_t kMost = 16384;   // more descriptors only cost memory
    rlimit limit{};
    const bool is_known = ::getrlimit(RLIMIT_NOFILE, &limit) == 0;
    return new OpenFiles(is_known ? static_cast<Index>(std::min(limit.rlim_cur / 2, kMost)) : 256);
  }();
  return *all;
}

void OpenFiles::make_room() {
  while (!uses_.empty() && std::ssize(uses_) + pinned_ >= most_) {
    uses_.back().pool->files.erase(uses_.back().path);
    uses_.pop_back();
  }
}

FilePool::State::~State() {
  const std::lock_guard lock(all.mutex_);
  for (const auto& [path, use] : files.files) all.uses_.erase(use);
  all.pinned_ -= std::ssize(files.pinned);
}

Result<std::shared_ptr<const File>> FilePool::open(const std::string& path) {
  OpenFiles& all = state_->all;
  OpenFiles::Pool& mine = state_->files;
  const auto known = [&]() -> std::shared_ptr<const File> {
    if (const auto it = mine.pinned.find(path); it != mine.pinned.end()) return it->second;
    const auto it = mine.files.find(path);
    if (it == mine.files.end()) return nullptr;
    all.uses_.splice(all.uses_.begin(), all.uses_, it->second);
    return it->second->file;
  };
  {
    const std::lock_guard lock(all.mutex_);
    if (auto file = known()) return file;
    all.make_room();
  }
  auto opened = std::make_shared<const File>(
      TRY(File::open(path, state_->access)));  // opened without the lock, so that others need not wait
  const std::lock_guard lock(all.mutex_);
  if (auto file = known()) return file;
  if (mine.reads != File::Reads::kInOrder) opened->expect(mine.reads);
  all.make_room();
  all.uses_.push_front({&mine, path, opened});
  mine.files[path] = all.uses_.begin();
  return opened;
}

void FilePool::expect(File::Reads reads) {
  const std::lock_guard lock(state_->all.mutex_);
  OpenFiles::Pool& mine = state_->files;
  if (mine.reads == reads) return;
  mine.reads = reads;
  for (const auto& [path, use] : mine.files) use->file->expect(reads);
  for (const auto& [name, file] : mine.pinned) file->expect(reads);
}

void FilePool::pin(const std::string& name, File file) {
  const std::lock_guard lock(state_->all.mutex_);
  state_->all.make_room();
  const auto pinned = std::make_shared<const File>(std::move(file));
  if (state_->files.pinned.insert_or_assign(name, pinned).second) ++state_->all.pinned_;
}

}  // namespace reshard
