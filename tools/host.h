// SPDX-License-Identifier: Apache-2.0
// The program that calls commands from Python, and what commands take from their process or from that program.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {
class Device;
}

namespace reshard::tools {

// The environment variables that commands read, with their values.
using Environment = std::map<std::string, std::string>;
// Reads the variables of this process. No other thread may change the environment meanwhile; within Python the caller
// holds the GIL.
Environment process_environment_of_commands();
// Returns a variable of the host, or of the process in the program; empty if it is not set.
std::string environment_variable(const std::string& name);

// The command that runs in this thread, as it can be pasted into a shell, for reports; secrets of URLs are left out.
const std::string& command_text();
void set_command_text(const std::vector<std::string>& words);

// A program that calls commands (tools/python) and takes their output.
struct Host {
  Index resident = 0;                            // bytes that the process holds already; --memory comes on top
  Environment environment;                       // as of the beginning of the call, because other threads may change it
  const std::atomic<bool>* interrupt = nullptr;  // ends a command when set
  std::function<void(Index done, Index total)> progress;  // bytes; called from any thread
  std::function<Result<Device*>(const std::string&, Index)>
      device;          // opens a device by name and memory cap (open_device)
  std::string answer;  // the JSON of --json
};
// Returns the host of this thread; null in the program.
Host* host();
// Sets the host of this thread until the scope ends.
class HostScope {
 public:
  explicit HostScope(Host& caller);
  ~HostScope();
  HostScope(const HostScope&) = delete;
  HostScope& operator=(const HostScope&) = delete;

 private:
  Host* before_;
};

}  // namespace reshard::tools
