// Preloaded into one rank of several: makes the n-th call of one kind go wrong there.
//
//     RESHARD_FAULT="RANK CALL N WHAT"    CALL: pread, pwrite, fallocate, fdatasync, rename
//                                         WHAT: eio, enospc, kill (this process dies), stop (it halts for three
//                                         seconds)
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Fault {
  char call[16] = "";
  char what[16] = "";
  long n = 0;  // 0: no fault in this process

  Fault() {
    const char *text = std::getenv("RESHARD_FAULT"), *mine = std::getenv("OMPI_COMM_WORLD_RANK");
    int rank = -1;
    if (text == nullptr || mine == nullptr) return;
    if (std::sscanf(text, "%d %15s %ld %15s", &rank, call, &n, what) != 4 || rank != std::atoi(mine)) n = 0;
  }
};

// Returns whether this call fails, and sets errno.
bool goes_wrong(const char* call) {
  static const Fault fault;
  static std::atomic<long> seen{0};
  if (fault.n == 0 || std::strcmp(call, fault.call) != 0 || ++seen != fault.n) return false;
  if (std::strcmp(fault.what, "kill") == 0) ::kill(::getpid(), SIGKILL);
  if (std::strcmp(fault.what, "stop") == 0) {
    if (::fork() == 0) {  // the child resumes this process later
      ::sleep(3);
      ::kill(::getppid(), SIGCONT);
      ::_exit(0);
    }
    ::kill(::getpid(), SIGSTOP);
    return false;
  }
  errno = std::strcmp(fault.what, "enospc") == 0 ? ENOSPC : EIO;
  return true;
}

template <class F>
F next(const char* name) {
  return reinterpret_cast<F>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

ssize_t pread(int fd, void* buffer, size_t n, off_t offset) {
  static const auto real = next<ssize_t (*)(int, void*, size_t, off_t)>("pread");
  return goes_wrong("pread") ? -1 : real(fd, buffer, n, offset);
}
ssize_t pread64(int fd, void* buffer, size_t n, off_t offset) { return pread(fd, buffer, n, offset); }

ssize_t pwrite(int fd, const void* buffer, size_t n, off_t offset) {
  static const auto real = next<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  return goes_wrong("pwrite") ? -1 : real(fd, buffer, n, offset);
}
ssize_t pwrite64(int fd, const void* buffer, size_t n, off_t offset) { return pwrite(fd, buffer, n, offset); }

int fallocate(int fd, int mode, off_t offset, off_t length) {
  static const auto real = next<int (*)(int, int, off_t, off_t)>("fallocate");
  return goes_wrong("fallocate") ? -1 : real(fd, mode, offset, length);
}
int fallocate64(int fd, int mode, off_t offset, off_t length) { return fallocate(fd, mode, offset, length); }

int fdatasync(int fd) {
  static const auto real = next<int (*)(int)>("fdatasync");
  return goes_wrong("fdatasync") ? -1 : real(fd);
}

int renameat2(int from_fd, const char* from, int to_fd, const char* to, unsigned flags) {
  if (goes_wrong("rename")) return -1;
  return static_cast<int>(::syscall(SYS_renameat2, from_fd, from, to_fd, to, flags));
}

}  // extern "C"
