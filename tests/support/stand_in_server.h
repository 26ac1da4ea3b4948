// Runs tests/storage/stand_in.py: S3, the hub and a web server over a directory, on a local port.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "tests/support/run_command.h"

namespace reshard {

class StandInServer {
 public:
  // Aborts if there is no python3. `options` are those of stand_in.py.
  explicit StandInServer(const std::string& directory, const std::vector<std::string>& options = {});
  ~StandInServer();
  StandInServer(const StandInServer&) = delete;
  StandInServer& operator=(const StandInServer&) = delete;

  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
  // Makes the next requests fail. `json` is a list of {"fault", "times", "match"}.
  void set_faults(const std::string& json) const { (void)request("PUT", json); }
  // Returns the requests since the last call, as JSON.
  std::string take_requests() const { return request("GET", ""); }

  // Returns environment variables that make a program use it as S3, as GCS and as the hub, without credentials.
  std::vector<std::string> environment(const std::vector<std::string>& more = {}) const;
  // Runs reshard in that environment.
  CommandResult run(std::vector<std::string> args, const std::vector<std::string>& more = {}) const;

 private:
  std::string request(const std::string& method, const std::string& body) const;
  pid_t process_ = -1;
  int port_ = 0;
};

}  // namespace reshard
