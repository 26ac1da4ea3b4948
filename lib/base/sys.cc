#include "lib/base/sys.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>

namespace reshard {
namespace {

SysCalls table = {
    [](const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); },
    ::close,
    ::fstat,
    ::pread,
    ::pwrite,
    ::fallocate,
    ::ftruncate,
    ::fdatasync,
    ::fsync,
    ::mkdir,
    [](const char* from, const char* to, unsigned flags) { return ::renameat2(AT_FDCWD, from, AT_FDCWD, to, flags); },
    ::unlink,
    ::rmdir,
    ::readdir,
};

}  // namespace

const SysCalls& sys() { return table; }

ScopedSysCalls::ScopedSysCalls(const SysCalls& replacement) : saved_(table) { table = replacement; }
ScopedSysCalls::~ScopedSysCalls() { table = saved_; }

}  // namespace reshard
