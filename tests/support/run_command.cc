#include "tests/support/run_command.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>

#include "tests/support/soak.h"

extern char** environ;

namespace reshard {
namespace {

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
    read = ends[0];
    write = ends[1];
  }
  ~Pipe() {
    ::close(read);
    if (write >= 0) ::close(write);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_write() {
    ::close(write);
    write = -1;
  }
};

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const std::string& t : texts) out.push_back(const_cast<char*>(t.c_str()));
  out.push_back(nullptr);
  return out;
}

std::vector<std::string> environment(const std::vector<std::string>& changes) {
  std::vector<std::string> out = changes;
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string entry = *e;
    bool replaced = false;
    for (const std::string& c : changes) replaced = replaced || entry.starts_with(c.substr(0, c.find('=') + 1));
    if (!replaced) out.push_back(entry);
  }
#ifdef __SANITIZE_ADDRESS__
  out.emplace_back("RESHARD_MEMORY=1GiB");  // the sanitizers' own memory counts too
#endif
  // The search for leaks takes a third of a short run. In the tests' own process it is always on.
  if (kSanitized && !soak_is_asked()) out.emplace_back("LSAN_OPTIONS=detect_leaks=0");
  return out;
}

}  // namespace

CommandResult run_command(const std::vector<std::string>& argv, double seconds, const std::vector<std::string>& env) {
  Pipe out, err;
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, out.write, STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, err.write, STDERR_FILENO);
  const std::vector<std::string> variables = environment(env);
  pid_t pid = -1;
  const int spawned =
      ::posix_spawn(&pid, argv[0].c_str(), &actions, nullptr, pointers(argv).data(), pointers(variables).data());
  ::posix_spawn_file_actions_destroy(&actions);
  if (spawned != 0) return {127, "", argv[0] + ": cannot be started", false};
  out.close_write();
  err.close_write();

  CommandResult result;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::array<pollfd, 2> ends = {{{out.read, POLLIN, 0}, {err.read, POLLIN, 0}}};
  while (ends[0].fd >= 0 || ends[1].fd >= 0) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) {
      result.timed_out = true;
      ::kill(pid, SIGKILL);
      break;
    }
    if (::poll(ends.data(), ends.size(), static_cast<int>(left.count())) < 0 && errno != EINTR) break;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      if (ends[i].fd < 0 || ends[i].revents == 0) continue;
      std::array<char, 4096> buffer{};
      const ssize_t n = ::read(ends[i].fd, buffer.data(), buffer.size());
      if (n > 0)
        (i == 0 ? result.out : result.err).append(buffer.data(), static_cast<std::size_t>(n));
      else if (n == 0 || errno != EINTR)
        ends[i].fd = -1;
    }
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  result.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return result;
}

CommandResult reshard_cli(std::vector<std::string> args, const std::vector<std::string>& more) {
  args.insert(args.end(), more.begin(), more.end());
  const bool has_findings = !args.empty() && (args.front() == "verify" || args.front() == "check");
  if (has_findings && std::ranges::find(args, "--fail-on") == args.end())
    args.insert(args.begin() + 1, {"--fail-on", "note"});
  args.insert(args.begin(), RESHARD_BINARY);
  return run_command(args);
}

}  // namespace reshard
