#include "tests/support/fake_cufile.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <new>

namespace reshard {

FakeCuFile& fresh_fake_cufile() {
  void* library = ::dlopen(RESHARD_FAKE_CUFILE, RTLD_NOW | RTLD_LOCAL);
  void* state = library ? ::dlsym(library, "fake_cufile") : nullptr;
  if (!state) {
    std::fprintf(stderr, "no fake cuFile at %s\n", RESHARD_FAKE_CUFILE);
    std::abort();
  }
  return *new (state) FakeCuFile;
}

}  // namespace reshard
