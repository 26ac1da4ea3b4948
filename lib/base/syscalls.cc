// SPDX-License-Identifier: Apache-2.0
#include "lib/base/syscalls.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace reshard {
namespace {

Syscalls table = {
    [](const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); },
    ::close,
    ::fstat,
    ::fstatat,
    ::statx,
    ::pread,
    ::pwrite,
    ::write,
    ::fallocate,
    ::ftruncate,
    ::fdatasync,
    ::fsync,
    ::mkdir,
    [](const char* from, const char* to, unsigned flags) { return ::renameat2(AT_FDCWD, from, AT_FDCWD, to, flags); },
    ::link,
    ::unlink,
    ::rmdir,
    ::opendir,
    ::readdir,
    ::readlink,
    ::realpath,
    ::flock,
};

}  // namespace

const Syscalls& sys() { return table; }

ScopedSyscalls::ScopedSyscalls(const Syscalls& replacement) : saved_(table) { table = replacement; }
ScopedSyscalls::~ScopedSyscalls() { table = saved_; }

}  // namespace reshard
