// SPDX-License-Identifier: Apache-2.0
// HTTP requests through libcurl, which is opened when the first URL is used: a program that reads local files alone
// starts without it and runs where it is not installed.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/base/result.h"

namespace reshard {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;  // names in lower case

struct HttpRequest {
  std::string url;  // percent-encoded
  HttpHeaders headers;
  MutableBytes into;    // of a range: its bytes go here, and the reply's body stays empty
  bool ranged = false;  // asks for a range; if the server sends the whole object, the reply ends after its headers
};

struct HttpReply {
  int status = 0;
  HttpHeaders headers;
  std::string body;
  std::string_view header(std::string_view name) const;  // empty if absent
};

// Limits of every request. Seconds.
struct HttpLimits {
  long connect_timeout = 10;
  long idle_timeout = 30;    // less than 1 KiB/s for so long ends a request; RESHARD_HTTP_TIMEOUT
  int tries = 6;             // RESHARD_HTTP_TRIES
  double first_pause = 0.1;  // before the second try; doubled before each further one, up to 5, with jitter
};
const HttpLimits& http_limits();

// Opens libcurl. Unsupported if this build has no HTTP or the library is not installed. Thread-safe; call it before
// entering a sandbox, which does not let libraries be opened.
Status open_http();
// The files that TLS and the resolver read, for a sandbox to allow.
std::vector<std::string> http_files();

// Sends one request and reads its reply; waits if 32 requests are under way already. `retryable` is set if there is
// no reply and trying again may help (a reset, a timeout, a short body).
struct HttpFailure {
  Error error;
  bool retryable = false;
};
using HttpOutcome = std::variant<HttpReply, HttpFailure>;
HttpOutcome send_once(const HttpRequest& request);

// Sends what `make` returns until there is a reply that is no server's trouble (408, 429, 5xx), or the tries are used
// up. `make` is asked anew before each try, as a signature holds for minutes. `is_trouble`: whether a reply that looks
// fine is to be tried again, too. An I/O error names `what`.
using MakeRequest = std::function<Result<HttpRequest>()>;
using IsTrouble = std::function<bool(const HttpReply& reply)>;
Result<HttpReply> send_http(const std::string& what, const MakeRequest& make, const IsTrouble& is_trouble = nullptr);

// What a process has asked for and received.
struct HttpCounts {
  Index requests = 0, retries = 0, bytes = 0;
};
HttpCounts http_counts();

constexpr int kMostRequests = 32;  // at a time

}  // namespace reshard
