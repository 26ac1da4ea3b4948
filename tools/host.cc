// SPDX-License-Identifier: Apache-2.0
#include "tools/host.h"

#include "lib/transport/job.h"

namespace reshard::tools {
namespace {

thread_local Host* current_host = nullptr;

}  // namespace

Environment process_environment_of_commands() {
  Environment out;
  for (const char* name : {"RESHARD_MEMORY", "TMPDIR"})
    if (const char* value = process_environment(name)) out.emplace(name, value);
  return out;
}

std::string environment_variable(const std::string& name) {
  const Environment all = host() ? host()->environment : process_environment_of_commands();
  const auto found = all.find(name);
  return found == all.end() ? "" : found->second;
}

Host* host() { return current_host; }
HostScope::HostScope(Host& caller) : before_(current_host) { current_host = &caller; }
HostScope::~HostScope() { current_host = before_; }

}  // namespace reshard::tools
