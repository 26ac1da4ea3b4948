// SPDX-License-Identifier: Apache-2.0
// HTTP requests through libcurl, which is loaded when the first URL is used: a program that reads only local files
// starts without it and runs on machines where it is not installed.
#pragma once

#include <atomic>
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
  HttpHeaders headers = {};
  std::string method = "GET";
  Bytes body = {};         // of a PUT or POST; the caller's memory, which must outlive the request
  MutableBytes into = {};  // receives the bytes of a range; the reply's body is then empty
  bool is_local = false;   // asks a service of this machine: without a proxy, and for at most 2 seconds
  bool ranged = false;     // requests a range; a reply with the whole object is cut off after its headers
};

struct HttpReply {
  int status = 0;
  HttpHeaders headers;
  std::string body;
  std::string_view header(std::string_view name) const;  // empty if absent
};

// Returns whether a status says that the server failed or is overloaded, so that the request should be tried again:
// 408, 429, 5xx.
bool is_temporary_failure(int status);

// Limits of every request, in seconds.
struct HttpLimits {
  long connect_timeout = 10;
  long idle_timeout = 30;    // a request fails after this time below 1 KiB/s; RESHARD_HTTP_TIMEOUT
  int tries = 6;             // RESHARD_HTTP_TRIES
  double first_pause = 0.1;  // before the second try; doubled before each further one, up to 5, with jitter
};
const HttpLimits& http_limits();

// Ends requests and the pauses between tries with an error soon after a flag becomes true. One that was added must
// outlive all requests unless it is removed.
void add_http_interrupt(const std::atomic<bool>* flag);
void remove_http_interrupt(const std::atomic<bool>* flag);
// Ends them for good, because the process exits.
void end_http();
bool is_http_interrupted();

// Loads libcurl. Fails (unsupported) if this build has no HTTP or the library is not installed. Call it before entering
// a sandbox, in which libraries cannot be loaded. Thread-safe.
Status open_http();

// Returns what reads URLs: "libcurl/7.88.1". Fails as open_http() does. Thread-safe.
Result<std::string> http_version();
// Returns the files that TLS and the resolver read, which a sandbox must allow.
std::vector<std::string> http_files();

// Sends one request and reads its reply; waits while kMostRequests are in flight. `retryable` is set if there is no
// reply and another try may help (a reset, a timeout, a short body).
struct HttpFailure {
  Error error;
  bool retryable = false;
};
using HttpOutcome = std::variant<HttpReply, HttpFailure>;
HttpOutcome send_once(const HttpRequest& request);

// Sends the request that `make` returns until a reply is not a temporary failure or the tries are used up. Calls `make`
// before each try, because a signature is valid for minutes only. `should_retry` returns whether a reply with another
// status should be retried too. Errors (I/O) name `what`.
using MakeRequest = std::function<Result<HttpRequest>()>;
using ShouldRetry = std::function<bool(const HttpReply& reply)>;
Result<HttpReply> send_http(const std::string& what, const MakeRequest& make,
                            const ShouldRetry& should_retry = nullptr);

// The requests of this process so far, and the bytes it received.
struct HttpCounts {
  Index requests = 0, retries = 0, bytes = 0;
};
HttpCounts http_counts();

constexpr int kMostRequests = 32;  // at a time

}  // namespace reshard
