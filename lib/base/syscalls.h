// SPDX-License-Identifier: Apache-2.0
// The table through which all file operations go, so that a test can make the n-th call fail, transfer less, or kill
// the process. The default entries are the C library's functions. tests/architecture_test.cc fails if a source calls
// one of them directly.
#pragma once

#include <dirent.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <cerrno>
#include <cstddef>

namespace reshard {

struct Syscalls {
  int (*open)(const char* path, int flags, mode_t mode);
  int (*close)(int fd);
  int (*fstat)(int fd, struct stat* out);
  int (*fstatat)(int directory, const char* path, struct stat* out, int flags);  // stat() and lstat() too
  int (*statx)(int directory, const char* path, int flags, unsigned mask, struct statx* out);
  ssize_t (*pread)(int fd, void* buffer, std::size_t n, off_t offset);
  ssize_t (*pwrite)(int fd, const void* buffer, std::size_t n, off_t offset);
  ssize_t (*write)(int fd, const void* buffer, std::size_t n);
  int (*fallocate)(int fd, int mode, off_t offset, off_t length);
  int (*ftruncate)(int fd, off_t length);
  int (*fdatasync)(int fd);
  int (*fsync)(int fd);
  int (*mkdir)(const char* path, mode_t mode);
  int (*rename)(const char* from, const char* to, unsigned flags);  // renameat2's RENAME_ flags
  int (*link)(const char* from, const char* to);
  int (*unlink)(const char* path);
  int (*rmdir)(const char* path);
  DIR* (*opendir)(const char* path);
  dirent* (*readdir)(DIR* directory);
  ssize_t (*readlink)(const char* path, char* buffer, std::size_t n);
  char* (*realpath)(const char* path, char* resolved);
  int (*flock)(int fd, int operation);
};

const Syscalls& sys();

// Returns whether errno says, after a call with a path, that the path leads to nothing.
inline bool is_nothing_there() { return errno == ENOENT || errno == ENOTDIR; }

// Repeats a call that was interrupted by a signal.
template <class Call>
auto retry(Call call) {
  decltype(call()) r;
  do {
    r = call();
  } while (r < 0 && (errno == EINTR || errno == EAGAIN));
  return r;
}

// Replaces the table during its lifetime. For tests; no other thread may be inside a call.
class ScopedSyscalls {
 public:
  explicit ScopedSyscalls(const Syscalls& replacement);
  ~ScopedSyscalls();
  ScopedSyscalls(const ScopedSyscalls&) = delete;
  ScopedSyscalls& operator=(const ScopedSyscalls&) = delete;

 private:
  Syscalls saved_;
};

}  // namespace reshard
