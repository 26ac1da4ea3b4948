// SPDX-License-Identifier: Apache-2.0
// Restricts a process before it reads untrusted bytes, so that an attacker who takes it over can do little: Landlock
// restricts files, and an allowlist restricts system calls. On Linux, as far as the kernel supports them.
#pragma once

#include <string>
#include <vector>

#include "lib/base/result.h"

namespace reshard {

// What a process may use. Missing paths are ignored, and links are resolved when the sandbox is entered.
struct Sandbox {
  std::vector<std::string> listed;   // directories whose names, and those of all below, may be listed
  std::vector<std::string> read;     // files, and directories with all below, that may be read
  std::vector<std::string> written;  // paths that may also be written, created and removed
  bool network = false;              // connections may be made, for sources behind URLs; none are accepted
};

// The restrictions that the kernel applied.
struct Sandboxed {
  bool files = false;  // no other files can be opened, nothing can be executed
  bool calls = false;  // only the calls of the allowlist work: no sockets (but see Sandbox::network), programs,
                       // namespaces, mounts
};

// Restricts this thread, threads that it starts, and their processes, permanently. Must be called before other threads
// exist. Fails (I/O) if the limit of open files is too low to list the allowed paths.
Result<Sandboxed> enter_sandbox(const Sandbox& sandbox);
// Returns the version of the kernel's Landlock interface; 0: it has none, or it is disabled.
long landlock_version();
// Returns whether this process can open the allowed files only.
bool in_sandbox();

}  // namespace reshard
