// SPDX-License-Identifier: Apache-2.0
// Implements http.h with libcurl.
#define CURL_DISABLE_TYPECHECK
#include <curl/curl.h>

#include <algorithm>
#include <cctype>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>

#include "lib/base/find_function.h"
#include "lib/base/storage/http.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

struct Curl {
  decltype(&::curl_version) version = nullptr;
  decltype(&::curl_global_init) global_init = nullptr;
  decltype(&::curl_easy_init) easy_init = nullptr;
  decltype(&::curl_easy_reset) easy_reset = nullptr;
  decltype(&::curl_easy_setopt) easy_setopt = nullptr;
  decltype(&::curl_easy_perform) easy_perform = nullptr;
  decltype(&::curl_easy_getinfo) easy_getinfo = nullptr;
  decltype(&::curl_easy_strerror) easy_strerror = nullptr;
  decltype(&::curl_slist_append) slist_append = nullptr;
  decltype(&::curl_slist_free_all) slist_free_all = nullptr;
};

Result<Curl> load_curl() {
  void* const opened = TRY(open_library({"libcurl.so.4", "libcurl-gnutls.so.4"},
                                        "URLs are read with libcurl, which is not installed (Debian: libcurl4)"));
  Curl out;
  TRY(find_function(opened, "libcurl", "curl_version", out.version));
  TRY(find_function(opened, "libcurl", "curl_global_init", out.global_init));
  TRY(find_function(opened, "libcurl", "curl_easy_init", out.easy_init));
  TRY(find_function(opened, "libcurl", "curl_easy_reset", out.easy_reset));
  TRY(find_function(opened, "libcurl", "curl_easy_setopt", out.easy_setopt));
  TRY(find_function(opened, "libcurl", "curl_easy_perform", out.easy_perform));
  TRY(find_function(opened, "libcurl", "curl_easy_getinfo", out.easy_getinfo));
  TRY(find_function(opened, "libcurl", "curl_easy_strerror", out.easy_strerror));
  TRY(find_function(opened, "libcurl", "curl_slist_append", out.slist_append));
  TRY(find_function(opened, "libcurl", "curl_slist_free_all", out.slist_free_all));
  if (out.global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) return unsupported("libcurl does not start");
  return out;
}

const Result<Curl>& curl() {
  static const Result<Curl> loaded = load_curl();
  return loaded;
}

// A pool of libcurl handles, whose connections stay open for the next request. At most kMostRequests are in use at a
// time.
class Handles {
 public:
  CURL* take() {
    std::unique_lock lock(mutex_);
    free_.wait(lock, [&] { return in_use_ < kMostRequests; });
    ++in_use_;
    if (idle_.empty()) return curl()->easy_init();
    CURL* const handle = idle_.back();
    idle_.pop_back();
    return handle;
  }
  void give_back(CURL* handle) {
    {
      const std::lock_guard lock(mutex_);
      --in_use_;
      if (handle) idle_.push_back(handle);
    }
    free_.notify_one();
  }
  static Handles& of_process() {
    static Handles* const all = new Handles();  // never destroyed: threads may read files while the program exits
    return *all;
  }

 private:
  std::mutex mutex_;
  std::condition_variable free_;
  int in_use_ = 0;
  std::vector<CURL*> idle_;
};

struct PooledHandle {
  PooledHandle() : handle(Handles::of_process().take()) {}
  ~PooledHandle() { Handles::of_process().give_back(handle); }
  PooledHandle(const PooledHandle&) = delete;
  PooledHandle& operator=(const PooledHandle&) = delete;
  CURL* const handle;
};

constexpr std::size_t kMostBody = std::size_t{256} << 20;  // of a listing; data goes to HttpRequest::into

// The state of a request that libcurl's callbacks update.
struct Receiving {
  const HttpRequest& request;
  HttpReply reply;
  std::size_t received = 0;  // bytes of the range so far
  bool is_whole = false;     // the server ignored the range
  bool is_too_long = false;
};

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

std::size_t on_header(char* data, std::size_t size, std::size_t n, void* user) {
  Receiving& to = *static_cast<Receiving*>(user);
  const std::string_view line(data, size * n);
  if (line.starts_with("HTTP/")) {
    to.reply.headers.clear();  // headers of an interim reply or of a proxy
    const std::size_t space = line.find(' ');
    to.reply.status = space == std::string_view::npos ? 0 : std::atoi(std::string(line.substr(space + 1, 3)).c_str());
  } else if (const std::size_t colon = line.find(':'); colon != std::string_view::npos) {
    to.reply.headers.emplace_back(lower(line.substr(0, colon)), trimmed(line.substr(colon + 1)));
  }
  return size * n;
}

std::size_t on_data(char* data, std::size_t size, std::size_t n, void* user) {
  Receiving& to = *static_cast<Receiving*>(user);
  const std::size_t length = size * n;
  if (to.request.ranged && to.reply.status == 200) return to.is_whole = true, 0;
  const bool is_range = to.request.ranged && to.reply.status == 206;
  const std::size_t room = is_range ? to.request.into.size() - to.received : kMostBody - to.reply.body.size();
  if (length > room) return to.is_too_long = true, 0;
  if (is_range)
    std::memcpy(to.request.into.data() + to.received, data, length);
  else
    to.reply.body.append(data, length);
  if (is_range) to.received += length;
  return length;
}

const char* first_set(std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (const char* const value = std::getenv(name); value && *value) return value;
  return nullptr;
}

const char* certificates() {
  return first_set({"AWS_CA_BUNDLE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"});
}

bool is_worth_another_try(CURLcode code) {
  switch (code) {
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
    case CURLE_HTTP2:
    case CURLE_HTTP2_STREAM:
    case CURLE_PARTIAL_FILE:
    case CURLE_OPERATION_TIMEDOUT:
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
      return true;
    default:
      return false;
  }
}

std::string advice_for(CURLcode code) {
  switch (code) {
    case CURLE_COULDNT_RESOLVE_HOST:
      return "; check the host's name, the network and the proxy";
    case CURLE_COULDNT_CONNECT:
      return "; check the endpoint, the network and the proxy (https_proxy)";
    case CURLE_OPERATION_TIMEDOUT:
      return "; the server or the network is too slow: try again later, or raise RESHARD_HTTP_TIMEOUT (seconds)";
    case CURLE_PEER_FAILED_VERIFICATION:
      return "; the server's certificate is not trusted: name its authority's file in AWS_CA_BUNDLE or SSL_CERT_FILE";
    default:
      return "";
  }
}

HttpFailure failure_of(CURLcode code, const HttpRequest& request, const char* details) {
  if (code == CURLE_ABORTED_BY_CALLBACK) return {io_error("interrupted")};
  const std::string why = *details ? details : curl()->easy_strerror(code);
  const std::string host(split_http_url(request.url).host);
  return {io_error((request.method == "GET" ? "cannot read from " : "cannot write to ") + host + ": " + why +
                   advice_for(code)),
          is_worth_another_try(code)};
}

int on_progress(void*, curl_off_t, curl_off_t, curl_off_t, curl_off_t) { return is_http_interrupted() ? 1 : 0; }

// Returns the seconds after which a request fails although bytes still trickle in.
long total_timeout(const HttpRequest& request) {
  constexpr long kIdleTimes = 10;
  constexpr std::size_t kSlowest = std::size_t{4} << 10;  // bytes a second
  return kIdleTimes * http_limits().idle_timeout +
         static_cast<long>((request.body.size() + request.into.size()) / kSlowest);
}

void set_options(CURL* handle, const HttpRequest& request, Receiving& to, curl_slist* headers, char* details) {
  const auto set = curl()->easy_setopt;
  curl()->easy_reset(handle);  // keeps the connection
  set(handle, CURLOPT_URL, request.url.c_str());
  set(handle, CURLOPT_PATH_AS_IS, 1L);
  set(handle, CURLOPT_NOSIGNAL, 1L);
  set(handle, CURLOPT_HTTPHEADER, headers);
  set(handle, CURLOPT_HEADERFUNCTION, on_header);
  set(handle, CURLOPT_HEADERDATA, &to);
  set(handle, CURLOPT_WRITEFUNCTION, on_data);
  set(handle, CURLOPT_WRITEDATA, &to);
  set(handle, CURLOPT_ERRORBUFFER, details);
  set(handle, CURLOPT_CONNECTTIMEOUT, http_limits().connect_timeout);
  set(handle, CURLOPT_LOW_SPEED_LIMIT, 1024L);
  set(handle, CURLOPT_LOW_SPEED_TIME, http_limits().idle_timeout);
  set(handle, CURLOPT_TIMEOUT, total_timeout(request));
  set(handle, CURLOPT_BUFFERSIZE, 256L << 10);
  set(handle, CURLOPT_NOPROGRESS, 0L);
  set(handle, CURLOPT_XFERINFOFUNCTION, on_progress);
  if (request.method != "GET") set(handle, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  if (request.method == "PUT" || request.method == "POST") {
    set(handle, CURLOPT_POSTFIELDS, reinterpret_cast<const char*>(request.body.data()));
    set(handle, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
    set(handle, CURLOPT_UPLOAD_BUFFERSIZE, 512L << 10);
  }
  if (const char* file = certificates()) set(handle, CURLOPT_CAINFO, file);
  if (request.is_local) {
    set(handle, CURLOPT_NOPROXY, "*");
    set(handle, CURLOPT_CONNECTTIMEOUT, 1L);
    set(handle, CURLOPT_TIMEOUT, 2L);
  }
}

}  // namespace

Status open_http() {
  if (!curl()) return curl().error();
  return {};
}

Result<std::string> http_version() {
  TRY(open_http());
  const std::string_view all = curl()->version();  // "libcurl/7.88.1 OpenSSL/3.0.15 ..."
  return std::string(all.substr(0, all.find(' ')));
}

std::vector<std::string> http_files() {
  std::vector<std::string> out = {"/etc/ssl",
                                  "/etc/pki",
                                  "/etc/ca-certificates",
                                  "/etc/resolv.conf",
                                  "/etc/hosts",
                                  "/etc/host.conf",
                                  "/etc/nsswitch.conf",
                                  "/etc/gai.conf",
                                  "/etc/services",
                                  "/etc/crypto-policies",
                                  "/run/systemd/resolve"};
  if (const char* file = certificates()) out.emplace_back(file);
  return out;
}

HttpOutcome send_once(const HttpRequest& request) {
  if (const Status opened = open_http(); !opened) return HttpFailure{opened.error()};
  const std::string_view scheme = split_http_url(request.url).scheme;  // libcurl supports more than these two
  if (scheme != "https" && scheme != "http") return HttpFailure{usage_error("expected a URL of http or https")};
  const PooledHandle taken;
  if (!taken.handle) return HttpFailure{io_error("libcurl has no memory for a request")};
  curl_slist* headers = curl()->slist_append(nullptr, "User-Agent: reshard/" RESHARD_VERSION);
  headers = curl()->slist_append(headers, "Expect:");  // no round trip before a body
  for (const auto& [name, value] : request.headers)
    headers = curl()->slist_append(headers, (name + ": " + value).c_str());
  Receiving to{request, {}};
  char details[CURL_ERROR_SIZE] = "";
  set_options(taken.handle, request, to, headers, details);
  const CURLcode code = curl()->easy_perform(taken.handle);
  curl()->slist_free_all(headers);
  const std::string host(split_http_url(request.url).host);  // for messages
  if (code != CURLE_OK && !to.is_whole && !to.is_too_long) return failure_of(code, request, details);
  if (to.is_too_long) return HttpFailure{io_error(host + " sent more than requested"), true};
  if (to.reply.status == 206 && request.ranged && to.received != request.into.size())
    return HttpFailure{io_error(host + " sent " + std::to_string(to.received) + " of " + bytes_of(request.into.size())),
                       true};
  return std::move(to.reply);
}

}  // namespace reshard
