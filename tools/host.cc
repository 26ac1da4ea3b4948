// SPDX-License-Identifier: Apache-2.0
#include "tools/host.h"

#include "lib/base/shell.h"
#include "lib/base/storage/secret_query.h"
#include "lib/base/text.h"
#include "lib/transport/job.h"

namespace reshard::tools {
namespace {

thread_local Host* current_host = nullptr;
thread_local std::string current_command;

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

const std::string& command_text() { return current_command; }
void set_command_text(const std::vector<std::string>& words) {
  std::vector<std::string> out;
  for (const std::string& word : words) out.push_back(shell_word(without_secret_query(word)));
  current_command = join(out, " ");
}

Host* host() { return current_host; }
HostScope::HostScope(Host& caller) : before_(current_host) { current_host = &caller; }
HostScope::~HostScope() { current_host = before_; }

}  // namespace reshard::tools
