// SPDX-License-Identifier: Apache-2.0
// The table through which all file operations go, so that a test can make the n-th call fail, transfer less, or kill
// the process. The default entries are the C library's functions.
#pragma once

#include <dirent.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>

namespace reshard {

struct Syscalls {
  int (*open)(const char* path, int flags, mode_t mode);
  int (*close)(int fd);
  int (*fstat)(int fd, struct stat* out);
  ssize_t (*pread)(int fd, void* buffer, std::size_t n, off_t offset);
  ssize_t (*pwrite)(int fd, const void* buffer, std::size_t n, off_t offset);
  int (*fallocate)(int fd, int mode, off_t offset, off_t length);
  int (*ftruncate)(int fd, off_t length);
  int (*fdatasync)(int fd);
  int (*fsync)(int fd);
  int (*mkdir)(const char* path, mode_t mode);
  int (*rename)(const char* from, const char* to, unsigned flags);  // renameat2's RENAME_ flags
  int (*unlink)(const char* path);
  int (*rmdir)(const char* path);
  dirent* (*readdir)(DIR* directory);
};

const Syscalls& sys();

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
