// Preloaded into a process: makes the n-th allocation fail, counted from the beginning of main().
//
//     RESHARD_ALLOCATION_FAULT="N HOW FILE"    N: the first that fails, from 1; 0: none
//                                              HOW: once, or all (also those after it)
//                                              FILE: receives two numbers of 8 bytes: the allocations of this process
//                                              and of those that it forked; 1 if libhdf5 was among the callers of one
//                                              that failed
#include <dlfcn.h>
#include <elf.h>
#include <execinfo.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
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
const char* program = nullptr;      // its file, which the sandbox may keep from being opened later
long first = 0;
bool all = false;
int (*program_main)(int, char**, char**) = nullptr;

void* map_file(const char* path, int mode) {
  const int file = ::open(path, mode | O_CLOEXEC), protection = mode == O_RDWR ? PROT_READ | PROT_WRITE : PROT_READ;
  struct stat info {};
  if (file < 0 || ::fstat(file, &info) != 0) std::abort();
  void* const out = ::mmap(nullptr, static_cast<std::size_t>(info.st_size), protection, MAP_SHARED, file, 0);
  if (out == MAP_FAILED) std::abort();
  ::close(file);
  return out;
}

// Returns whether the function at `offset` of the program is one of libhdf5, which is linked in: H5malloc, H5F__open.
bool is_hdf5_function(std::size_t offset) {
  const auto* const header = reinterpret_cast<const Elf64_Ehdr*>(program);
  const auto* const sections = reinterpret_cast<const Elf64_Shdr*>(program + header->e_shoff);
  for (const Elf64_Shdr* s = sections; s != sections + header->e_shnum; ++s) {
    if (s->sh_type != SHT_SYMTAB) continue;
    const auto* const symbols = reinterpret_cast<const Elf64_Sym*>(program + s->sh_offset);
    const char* const names = program + sections[s->sh_link].sh_offset;
    for (std::size_t i = 0; i < s->sh_size / sizeof *symbols; ++i)
      if (symbols[i].st_value <= offset && offset < symbols[i].st_value + symbols[i].st_size)
        return std::strncmp(names + symbols[i].st_name, "H5", 2) == 0;
  }
  return false;
}

// Returns whether libhdf5 is among the callers.
bool is_of_hdf5() {
  void* frames[40];
  const int n = ::backtrace(frames, 40);
  Dl_info own{};
  if (::dladdr(reinterpret_cast<void*>(program_main), &own) == 0) return false;
  for (int i = 0; i < n; ++i) {
    Dl_info info{};
    if (::dladdr(frames[i], &info) == 0) continue;
    if (std::strstr(info.dli_fname, "libhdf5") != nullptr) return true;
    const auto offset = static_cast<std::size_t>(static_cast<char*>(frames[i]) - static_cast<char*>(info.dli_fbase));
    if (info.dli_fbase == own.dli_fbase && is_hdf5_function(offset)) return true;
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
    program = static_cast<const char*>(map_file("/proc/self/exe", O_RDONLY));
    made = static_cast<std::atomic<long>*>(map_file(path, O_RDWR));
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
