// SPDX-License-Identifier: Apache-2.0
// Looks up functions in a library opened at run time, because not every machine has it.
#pragma once

#include <dlfcn.h>

#include <string>

#include "lib/base/result.h"

namespace reshard {

// Sets `out` to the function `name` of `library`, a handle from dlopen(), or returns an unsupported error. `what` is
// the library's name in that error.
template <class Function>
Status find_function(void* library, const std::string& what, const char* name, Function& out) {
  out = reinterpret_cast<Function>(::dlsym(library, name));
  if (!out) return unsupported(what + " has no " + name);
  return {};
}

}  // namespace reshard
