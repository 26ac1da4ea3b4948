#include "lib/base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lib/base/sys.h"

namespace reshard {
namespace {

Error errno_error(const std::string& path, std::string_view what) {
  return io_error(path + ": " + std::string(what) + ": " + std::strerror(errno));
}

// Repeats a call that a signal cut short.
template <class Call>
auto retry(Call call) {
  decltype(call()) r;
  do {
    r = call();
  } while (r < 0 && (errno == EINTR || errno == EAGAIN));
  return r;
}

}  // namespace

Result<File> File::open(const std::string& path, Access access) {
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
  // Not every file system knows O_TMPFILE: create, then take the name away.
  const std::string path = directory + "/.reshard-temporary-" + std::to_string(::getpid());
  File file = TRY(create(path));
  if (sys().unlink(path.c_str()) != 0) return errno_error(path, "cannot unlink");
  return file;
}

Result<File> File::reopen_direct() const {
  const std::string link = "/proc/self/fd/" + std::to_string(fd_);
  const int fd = retry([&] { return sys().open(link.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC, 0); });
  if (fd < 0) return errno_error(path_, "cannot open for direct reading");
  return File(fd, path_);
}

File::File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) sys().close(fd_);
}

Result<Index> File::size() const {
  struct stat st {};
  if (sys().fstat(fd_, &st) != 0) return errno_error(path_, "cannot stat");
  return static_cast<Index>(st.st_size);
}

Status File::read_at(Index offset, MutableBytes out) const {
  std::size_t done = 0;
  while (done < out.size()) {
    const off_t where = offset + static_cast<off_t>(done);
    const ssize_t n = retry([&] { return sys().pread(fd_, out.data() + done, out.size() - done, where); });
    if (n < 0) return errno_error(at(path_, where), "cannot read");
    if (n == 0)
      return corrupt(at(path_, offset) + ": expected " + std::to_string(out.size()) + " bytes, got " +
                     std::to_string(done) + " to the end of the file");
    done += static_cast<std::size_t>(n);
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
    done += static_cast<std::size_t>(n);
  }
  return {};
}

Status File::allocate(Index length) const {
  if (length > 0 && retry([&] { return sys().fallocate(fd_, 0, 0, length); }) == 0) return {};
  if (length > 0 && errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL)
    return errno_error(path_, "cannot reserve " + std::to_string(length) + " bytes");
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
  if (size > limit)
    return corrupt(path + ": expected at most " + std::to_string(limit) + " bytes, got " + std::to_string(size));
  std::string out(static_cast<std::size_t>(size), '\0');
  TRY(file.read_at(0, {reinterpret_cast<std::byte*>(out.data()), out.size()}));
  return out;
}

Status replace_file(const std::string& path, std::string_view text) {
  const std::string temporary = path + ".partial-" + std::to_string(::getpid());
  const auto put = [&]() -> Status {
    File file = TRY(File::create(temporary));
    TRY(file.write_at(0, {reinterpret_cast<const std::byte*>(text.data()), text.size()}));
    TRY(file.sync_data());
    TRY(file.close());
    if (sys().rename(temporary.c_str(), path.c_str(), 0) != 0) return errno_error(path, "cannot replace");
    return sync_directory(parent_path(path));
  };
  Status status = put();
  if (!status) sys().unlink(temporary.c_str());
  return status;
}

Result<std::vector<DirectoryEntry>> list_directory(const std::string& path) {
  DIR* dir = ::opendir(path.c_str());
  if (dir == nullptr) return errno_error(path, "cannot list");
  std::vector<DirectoryEntry> out;
  while (const dirent* entry = ::readdir(dir)) {
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    struct stat st {};
    if (::fstatat(::dirfd(dir), entry->d_name, &st, 0) != 0) continue;  // a dangling link: as good as absent
    if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) continue;
    out.push_back({name, S_ISDIR(st.st_mode), S_ISREG(st.st_mode) ? static_cast<Index>(st.st_size) : 0,
                   static_cast<Index>(st.st_mtim.tv_sec) * 1'000'000'000 + st.st_mtim.tv_nsec});
  }
  ::closedir(dir);
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return out;
}

bool path_exists(const std::string& path) {
  struct stat st {};
  return ::lstat(path.c_str(), &st) == 0;
}

bool is_directory(const std::string& path) {
  struct stat st {};
  return ::stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode);
}

std::string path_join(std::string_view directory, std::string_view name) {
  std::string out(directory);
  if (!out.empty() && out.back() != '/') out += '/';
  return out.append(name);
}

std::string parent_path(const std::string& path) {
  std::string p = path;
  while (p.size() > 1 && p.back() == '/') p.pop_back();
  const std::size_t slash = p.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : p.substr(0, slash);
}

std::string base_name(const std::string& path) {
  std::string p = path;
  while (p.size() > 1 && p.back() == '/') p.pop_back();
  return p.substr(p.rfind('/') + 1);  // npos + 1 is 0
}

bool is_safe_relative_path(std::string_view name) {
  if (name.empty() || name.front() == '/') return false;
  if (name.find('\0') != std::string_view::npos || name.find('\\') != std::string_view::npos) return false;
  while (true) {
    const std::size_t slash = name.find('/');
    const std::string_view part = name.substr(0, slash);
    if (part.empty() || part == "." || part == "..") return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

Status make_directory(const std::string& path) {
  if (sys().mkdir(path.c_str(), 0777) != 0) return errno_error(path, "cannot make the directory");
  return {};
}

Status remove_file(const std::string& path) {
  if (sys().unlink(path.c_str()) != 0) return errno_error(path, "cannot remove");
  return {};
}

Status rename_no_replace(const std::string& from, const std::string& to) {
  if (sys().rename(from.c_str(), to.c_str(), RENAME_NOREPLACE) == 0) return {};
  if (errno == EINVAL && !path_exists(to)) {  // a file system without the flag
    if (sys().rename(from.c_str(), to.c_str(), 0) == 0) return {};
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

Status remove_tree(const std::string& path) {
  std::string unslashed = path;  // "link/" would follow the link
  while (unslashed.size() > 1 && unslashed.back() == '/') unslashed.pop_back();
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  const int fd = retry([&] { return sys().open(unslashed.c_str(), kFlags, 0); });
  DIR* dir = fd < 0 ? nullptr : ::fdopendir(fd);
  if (dir == nullptr) {
    Error error = errno_error(path, "cannot list");
    if (fd >= 0) sys().close(fd);
    return error;
  }
  Status status;
  while (const dirent* entry = ::readdir(dir)) {
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    const std::string child = path_join(path, name);
    struct stat st {};
    if (::lstat(child.c_str(), &st) != 0) continue;
    if (S_ISDIR(st.st_mode)) {
      status = remove_tree(child);
    } else if (sys().unlink(child.c_str()) != 0) {
      status = errno_error(child, "cannot remove");
    }
    if (!status) break;
  }
  ::closedir(dir);
  if (status && sys().rmdir(path.c_str()) != 0) status = errno_error(path, "cannot remove");
  return status;
}

Result<Index> free_space(const std::string& path) {
  struct statvfs st {};
  if (::statvfs(path.c_str(), &st) != 0) return errno_error(path, "cannot ask for free space");
  return static_cast<Index>(st.f_bavail) * static_cast<Index>(st.f_frsize);
}

Result<std::shared_ptr<const File>> FilePool::open(const std::string& path) {
  const std::lock_guard lock(mutex_);
  if (const auto it = slots_.find(path); it != slots_.end()) {
    it->second.last_use = ++clock_;
    return it->second.file;
  }
  auto file = std::make_shared<const File>(TRY(File::open(path, access_)));
  make_room();
  slots_[path] = {file, ++clock_, false};
  return file;
}

void FilePool::make_room() {
  while (static_cast<Index>(slots_.size()) >= capacity_) {
    auto oldest = slots_.end();
    for (auto it = slots_.begin(); it != slots_.end(); ++it)
      if (!it->second.pinned && (oldest == slots_.end() || it->second.last_use < oldest->second.last_use)) oldest = it;
    if (oldest == slots_.end()) return;
    slots_.erase(oldest);
  }
}

void FilePool::pin(const std::string& name, File file) {
  const std::lock_guard lock(mutex_);
  make_room();
  slots_[name] = {std::make_shared<const File>(std::move(file)), ++clock_, true};
}

}  // namespace reshard
