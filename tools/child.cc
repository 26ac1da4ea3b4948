// SPDX-License-Identifier: Apache-2.0
#include "tools/child.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "lib/base/text.h"
#include "tools/commands.h"

namespace reshard::tools {
namespace {

std::vector<char*> pointers_to(std::vector<std::string>& words) {
  std::vector<char*> out;
  for (std::string& word : words) out.push_back(word.data());
  return out;
}

std::string_view name_of(std::string_view variable) { return variable.substr(0, variable.find('=')); }

// Returns this process's environment, in which the given variables replace those of the same names.
std::vector<char*> environment_with(std::vector<std::string>& variables) {
  std::vector<char*> out = pointers_to(variables);
  const auto is_replaced = [&](const char* inherited) {
    return std::any_of(variables.begin(), variables.end(),
                       [&](const std::string& variable) { return name_of(variable) == name_of(inherited); });
  };
  for (char** variable = ::environ; *variable; ++variable)
    if (!is_replaced(*variable)) out.push_back(*variable);
  out.push_back(nullptr);
  return out;
}

}  // namespace

Result<int> run_child(std::vector<std::string> words, OnInterrupt on_interrupt, std::vector<std::string> variables) {
  std::fflush(nullptr);
  std::vector<char*> argv = pointers_to(words);
  argv.push_back(nullptr);
  const std::vector<char*> environment = environment_with(variables);
  pid_t child = 0;
  if (const int error = ::posix_spawnp(&child, argv[0], nullptr, nullptr, argv.data(), environment.data()); error != 0)
    return io_error(printable(words[0]) + ": " + std::strerror(error));
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return io_error(std::string("waitpid: ") + std::strerror(errno));
    if (on_interrupt == OnInterrupt::kEndChild && interrupted()) ::kill(child, SIGTERM);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace reshard::tools
