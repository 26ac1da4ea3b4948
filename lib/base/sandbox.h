// What a process gives up before it reads the bytes of strangers, so that one that is taken over by them can do little:
// Landlock for files, a list of system calls for the rest. On Linux, as far as the kernel has them.
#pragma once

#include <string>
#include <vector>

#include "lib/base/result.h"

namespace reshard {

// Paths that are not there are left out. Links are followed, as they lead now.
struct Sandbox {
  std::vector<std::string> listed;   // directories whose names, and those of all below, may be listed
  std::vector<std::string> read;     // files, and directories with all below, that may be read
  std::vector<std::string> written;  // likewise, that may be read, written, made and removed
};

// What took hold.
struct Sandboxed {
  bool files = false;  // no other files can be opened, nothing can be executed
  bool calls = false;  // no sockets, no programs, no other processes' memory, no mounts
};

// Holds for this thread, those that it starts, and processes that these start, for ever. To be called before there are
// other threads. An I/O error where too few open files are allowed to say what it may open.
Result<Sandboxed> enter_sandbox(const Sandbox& sandbox);
// Whether this process has given up files.
bool in_sandbox();

}  // namespace reshard
