// SPDX-License-Identifier: Apache-2.0
// Opens a library at run time, because not every machine has it, and looks up its functions.
#pragma once

#include <dlfcn.h>

#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <string>

#include "lib/base/result.h"

namespace reshard {

// Opens the first of these libraries that can be opened. Otherwise returns an unsupported error: `missing`, and the
// loader's words about the first one. If memory ran out, returns an I/O error, because the library is there.
inline Result<void*> open_library(std::initializer_list<const char*> names, const std::string& missing,
                                  int flags = RTLD_NOW | RTLD_LOCAL) {
  std::string why;
  for (const char* name : names) {
    if (void* const opened = ::dlopen(name, flags)) return opened;
    const char* const said = ::dlerror();
    const std::string words = said ? said : "";
    // The loader says only in words that memory ran out, and for most allocations not even that.
    if (words.find(std::strerror(ENOMEM)) != std::string::npos || words.find("failed to map") != std::string::npos)
      return io_error("cannot load a library, perhaps for lack of memory: " + words);
    if (why.empty()) why = words;
  }
  return unsupported(missing + ": " + why);
}

// Sets `out` to the function `name` of `library`, a handle from dlopen(), or returns an unsupported error. `what` is
// the library's name in that error.
template <class Function>
Status find_function(void* library, const std::string& what, const char* name, Function& out) {
  out = reinterpret_cast<Function>(::dlsym(library, name));
  if (!out) return unsupported(what + " has no " + name);
  return {};
}

}  // namespace reshard
