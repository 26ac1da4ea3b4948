// SPDX-License-Identifier: Apache-2.0
#include "lib/base/storage/http.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "lib/base/io_failure_watch.h"
#include "lib/base/storage/url.h"

namespace reshard {
namespace {

std::atomic<Index> sent{0}, sent_again{0}, received{0};
std::atomic<bool> is_ending{false};

// Flags that end requests. Never destroyed, because requests may outlast main().
struct Interrupts {
  std::mutex mutex;
  std::set<const std::atomic<bool>*> flags;

  static Interrupts& of_process() {
    static Interrupts* const interrupts = new Interrupts;
    return *interrupts;
  }
};

// Returns an environment variable's value, a whole number from 1 to 3600, or `usual` if it is unset or invalid.
int number_in(const char* variable, int usual) {
  const char* const text = std::getenv(variable);
  const int value = text ? std::atoi(text) : 0;
  return value >= 1 && value <= 3600 ? value : usual;
}

double jitter() {
  thread_local std::mt19937 random(std::random_device{}());
  return std::uniform_real_distribution<double>(0.5, 1.0)(random);
}

// Returns the seconds of a reply's Retry-After header, or 0 if it has none.
double retry_after(const HttpReply* reply) {
  const std::string_view text = reply ? reply->header("retry-after") : std::string_view();
  int seconds = 0;
  (void)std::from_chars(text.data(), text.data() + text.size(), seconds);
  constexpr int kMost = 30;
  return std::clamp(seconds, 0, kMost);
}

// Hosts that have recently not answered in all tries. Further requests to them fail at once, so that a command does
// not wait for the timeout once per file.
class SilentHosts {
 public:
  void add(const std::string& host, const Error& error) {
    const std::lock_guard lock(mutex_);
    errors_.insert_or_assign(host, Silence{Clock::now(), error});
  }
  std::optional<Error> find(const std::string& host) {
    constexpr std::chrono::seconds kHolds(10);
    const std::lock_guard lock(mutex_);
    const auto at = errors_.find(host);
    if (at == errors_.end() || Clock::now() - at->second.since > kHolds) return std::nullopt;
    return at->second.error;
  }
  static SilentHosts& of_process() {
    static auto* const all = new SilentHosts();
    return *all;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Silence {
    Clock::time_point since;
    Error error;
  };
  std::mutex mutex_;
  std::map<std::string, Silence> errors_;
};

// Waits before a try, in short steps: an interrupted program must end at once.
void pause_before(int next_try, const HttpReply* reply) {
  constexpr double kMost = 5, kStep = 0.05;
  double pause = http_limits().first_pause;
  for (int i = 1; i < next_try; ++i) pause = std::min(pause * 2, kMost);
  for (double left = std::max(pause * jitter(), retry_after(reply)); left > 0 && !is_http_interrupted(); left -= kStep)
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(left, kStep)));
}

}  // namespace

bool is_temporary_failure(int status) { return status == 408 || status == 429 || status >= 500; }

std::string_view HttpReply::header(std::string_view name) const {
  for (const auto& [key, value] : headers)
    if (key == name) return value;
  return {};
}

const HttpLimits& http_limits() {
  static const HttpLimits limits = [] {
    HttpLimits out;
    out.idle_timeout = number_in("RESHARD_HTTP_TIMEOUT", static_cast<int>(out.idle_timeout));
    out.connect_timeout = std::min(out.connect_timeout, out.idle_timeout);
    out.tries = number_in("RESHARD_HTTP_TRIES", out.tries);
    return out;
  }();
  return limits;
}

void add_http_interrupt(const std::atomic<bool>* flag) {
  Interrupts& interrupts = Interrupts::of_process();
  const std::lock_guard lock(interrupts.mutex);
  interrupts.flags.insert(flag);
}

void remove_http_interrupt(const std::atomic<bool>* flag) {
  Interrupts& interrupts = Interrupts::of_process();
  const std::lock_guard lock(interrupts.mutex);
  interrupts.flags.erase(flag);
}

void end_http() { is_ending = true; }

bool is_http_interrupted() {
  if (is_ending) return true;
  Interrupts& interrupts = Interrupts::of_process();
  const std::lock_guard lock(interrupts.mutex);
  return std::any_of(interrupts.flags.begin(), interrupts.flags.end(), [](const auto* flag) { return flag->load(); });
}

HttpCounts http_counts() { return {sent, sent_again, received}; }

Result<HttpReply> send_http(const std::string& what, const MakeRequest& make, const ShouldRetry& should_retry) {
  for (int attempt = 1;; ++attempt) {
    if (is_http_interrupted()) return io_error("interrupted").context(what);
    const HttpRequest request = TRY(make());
    const std::string host(split_http_url(request.url).host);
    if (attempt == 1)
      if (auto error = SilentHosts::of_process().find(host)) {
        ++io_failures;
        return std::move(*error).context(what);
      }
    ++sent;
    HttpOutcome outcome = send_once(request);
    HttpReply* const reply = std::get_if<HttpReply>(&outcome);
    if (reply) received += std::ssize(reply->body) + (reply->status == 206 ? std::ssize(request.into) : 0);
    const bool may_retry = attempt < http_limits().tries;
    const bool again = reply ? is_temporary_failure(reply->status) || (should_retry && should_retry(*reply))
                             : std::get<HttpFailure>(outcome).retryable;
    if (!again || !may_retry) {
      if (again || !reply) ++io_failures;
      if (reply) return std::move(*reply);
      Error error = std::get<HttpFailure>(outcome).error;
      if (attempt > 1) error = Error(error.code(), error.message() + " (tried " + std::to_string(attempt) + " times)");
      if (again) SilentHosts::of_process().add(host, error);
      return std::move(error).context(what);
    }
    ++sent_again;
    pause_before(attempt, reply);
  }
}

}  // namespace reshard
