// Preloaded into a process: makes the n-th allocation fail, counted from the beginning of main().
//
//     RESHARD_ALLOCATION_FAULT="N HOW FILE"    N: the first that fails, from 1; 0: none
//                                              HOW: once, or all (also those after it)
//                                              FILE: receives two numbers of 8 bytes: the allocations of this process
//                                              and of those that it forked; 1 if libhdf5 was among the callers of one
//                                              that failed
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* old, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);
}

namespace {

std::atomic<long>* made = nullptr;  // both numbers; null before main()
long first = 0;
bool all = false;
int (*program_main)(int, char**, char**) = nullptr;

// Returns whether libhdf5 is among the callers.
bool is_of_hdf5() {
  void* frames[40];
  const int n = ::backtrace(frames, 40);
  for (int i = 0; i < n; ++i) {
    Dl_info info{};
    if (::dladdr(frames[i], &info) != 0 && std::strstr(info.dli_fname, "libhdf5") != nullptr) return true;
  }
  return false;
}

bool fails() {
  static thread_local bool is_inside = false;
  if (made == nullptr || is_inside) return false;
  const long n = ++made[0];
  if (first == 0 || n < first || (n > first && !all)) return false;
  is_inside = true;
  if (made[1] == 0 && is_of_hdf5()) made[1] = 1;
  is_inside = false;
  errno = ENOMEM;
  return true;
}

int counted_main(int argc, char** argv, char** environment) {
  char how[8] = "", path[4096] = "";
  const char* const text = std::getenv("RESHARD_ALLOCATION_FAULT");
  if (text != nullptr && std::sscanf(text, "%ld %7s %4095s", &first, how, path) == 3) {
    all = std::strcmp(how, "all") == 0;
    const int file = ::open(path, O_RDWR | O_CLOEXEC);
    void* const shared = ::mmap(nullptr, 2 * sizeof *made, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || shared == MAP_FAILED) std::abort();
    ::close(file);
    made = static_cast<std::atomic<long>*>(shared);
  }
  return program_main(argc, argv, environment);
}

}  // namespace

extern "C" {

int __libc_start_main(int (*main)(int, char**, char**), int argc, char** argv, void (*init)(), void (*fini)(),
                      void (*loader_fini)(), void* stack_end) {
  program_main = main;
  using Start = int (*)(int (*)(int, char**, char**), int, char**, void (*)(), void (*)(), void (*)(), void*);
  const auto start = reinterpret_cast<Start>(::dlsym(RTLD_NEXT, "__libc_start_main"));
  return start(counted_main, argc, argv, init, fini, loader_fini, stack_end);
}

void* malloc(std::size_t size) { return fails() ? nullptr : __libc_malloc(size); }
void* calloc(std::size_t count, std::size_t size) { return fails() ? nullptr : __libc_calloc(count, size); }
void* realloc(void* old, std::size_t size) { return fails() ? nullptr : __libc_realloc(old, size); }
void* memalign(std::size_t alignment, std::size_t size) { return fails() ? nullptr : __libc_memalign(alignment, size); }
void* aligned_alloc(std::size_t alignment, std::size_t size) {
  return fails() ? nullptr : __libc_memalign(alignment, size);
}
int posix_memalign(void** out, std::size_t alignment, std::size_t size) {
  void* const memory = fails() ? nullptr : __libc_memalign(alignment, size);
  if (memory == nullptr) return ENOMEM;
  *out = memory;
  return 0;
}

}  // extern "C"
