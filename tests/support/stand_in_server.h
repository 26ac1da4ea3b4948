// tests/storage/stand_in.py as a process: S3, the hub and a web server over a directory, on a port of this machine.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "tests/support/run_command.h"

namespace reshard {

class StandInServer {
 public:
  // Ends the test program if there is no python3. `options` as stand_in.py has them.
  explicit StandInServer(const std::string& directory, const std::vector<std::string>& options = {});
  ~StandInServer();
  StandInServer(const StandInServer&) = delete;
  StandInServer& operator=(const StandInServer&) = delete;

  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
  // The next requests go wrong: JSON, a list of {"fault", "times", "match"}.
  void set_faults(const std::string& json) const { (void)request("PUT", json); }
  // What was asked for since the last call: JSON.
  std::string take_requests() const { return request("GET", ""); }

  // Variables for a program that is to find it as S3, as Google's interface and as the hub, and no credentials.
  std::vector<std::string> environment(const std::vector<std::string>& more = {}) const;
  // Runs reshard in that environment, and with these variables.
  CommandResult run(std::vector<std::string> args, const std::vector<std::string>& more = {}) const;

 private:
  std::string request(const std::string& method, const std::string& body) const;
  pid_t process_ = -1;
  int port_ = 0;
};

}  // namespace reshard
