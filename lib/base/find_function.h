// Functions of a library that is opened at run time, because not every machine has it.
#pragma once

#include <dlfcn.h>

#include <string>

#include "lib/base/result.h"

namespace reshard {

// Sets `out` to the function `name` of what dlopen() returned; an unsupported error where there is none. `what` names
// the library.
template <class Function>
Status find_function(void* library, const std::string& what, const char* name, Function& out) {
  out = reinterpret_cast<Function>(::dlsym(library, name));
  if (!out) return unsupported(what + " has no " + name);
  return {};
}

}  // namespace reshard
