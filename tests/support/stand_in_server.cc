#include "tests/support/stand_in_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>

namespace reshard {

StandInServer::StandInServer(const std::string& directory, const std::vector<std::string>& options) {
  std::vector<std::string> words = {"python3", RESHARD_SOURCE_DIR "/tests/storage/stand_in.py", directory};
  words.insert(words.end(), options.begin(), options.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::array<int, 2> pipe{};
  if (::pipe(pipe.data()) != 0) std::abort();
  process_ = ::fork();
  if (process_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::dup2(pipe[1], STDOUT_FILENO);
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(pipe[1]);
  std::FILE* const out = ::fdopen(pipe[0], "r");
  if (std::fscanf(out, "%d", &port_) != 1) std::abort();  // NOLINT(cert-err34-c): a port, or there is no server
  std::fclose(out);
}

StandInServer::~StandInServer() {
  ::kill(process_, SIGKILL);
  ::waitpid(process_, nullptr, 0);
}

std::string StandInServer::request(const std::string& method, const std::string& body) const {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(port_));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) std::abort();
  const std::string text =
      method + " /_control HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: " + std::to_string(body.size()) +
      "\r\n\r\n" + body;
  if (::write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size())) std::abort();
  std::string out;
  std::array<char, 65536> part{};
  for (ssize_t n = 0; (n = ::read(fd, part.data(), part.size())) > 0;)
    out.append(part.data(), static_cast<std::size_t>(n));
  ::close(fd);
  return out.substr(out.find("\r\n\r\n") + 4);
}

std::vector<std::string> StandInServer::environment(const std::vector<std::string>& more) const {
  std::vector<std::string> out = {"AWS_ENDPOINT_URL_S3=" + url(), "STORAGE_EMULATOR_HOST=" + url(),
                                  "HF_ENDPOINT=" + url(), "AWS_EC2_METADATA_DISABLED=true", "NO_GCE_CHECK=true"};
  for (const char* name : {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "HF_TOKEN",
                           "AWS_REGION", "AWS_DEFAULT_REGION", "http_proxy", "GOOGLE_OAUTH_ACCESS_TOKEN"})
    out.push_back(std::string(name) + "=");
  for (const char* name : {"AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "HF_TOKEN_PATH"})
    out.push_back(std::string(name) + "=/nowhere");
  for (const std::string& variable : more) {
    const std::string name = variable.substr(0, variable.find('=') + 1);
    std::erase_if(out, [&](const std::string& usual) { return usual.starts_with(name); });
    out.push_back(variable);
  }
  return out;
}

CommandResult StandInServer::run(std::vector<std::string> args, const std::vector<std::string>& more) const {
  args.insert(args.begin(), RESHARD_BINARY);
  return run_command(args, 60, environment(more));
}

}  // namespace reshard
