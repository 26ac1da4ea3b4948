// SPDX-License-Identifier: Apache-2.0
#include "tools/child.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "lib/base/text.h"
#include "tools/commands.h"

namespace reshard::tools {
namespace {

std::vector<char*> pointers_to(std::vector<std::string>& words) {
  std::vector<char*> out;
  for (std::string& word : words) out.push_back(word.data());
  return out;
}

// The first of two variables with one name counts, so the added ones come first.
std::vector<char*> environment_with(std::vector<std::string>& variables) {
  std::vector<char*> out = pointers_to(variables);
  for (char** variable = ::environ; *variable; ++variable) out.push_back(*variable);
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
