// SPDX-License-Identifier: Apache-2.0
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <new>

#include "lib/base/printable.h"
#include "lib/base/text.h"
#include "tools/commands.h"
#include "tools/job.h"

namespace reshard::tools {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> interrupt_flag{false};
// Used by signal handlers, two of which may run at once in different threads.
std::atomic<int> signal_received{0};
std::atomic<bool> ends_soon{false}, can_be_resumed{false};
std::atomic<Clock::rep> signal_time{0};  // since the clock's epoch; 0: not yet known
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<Clock::rep>::is_always_lock_free);
constexpr unsigned kGrace = 4;  // seconds after a signal
constexpr std::chrono::seconds kSameSignal{2};

// A second Ctrl-C ends the program at once. So does any other second signal, unless it arrives with the first: both
// mpirun and Slurm signal a task, and both the shell and the kernel send SIGHUP when a terminal is closed.
void on_signal(int signal) {
  const Clock::rep now = Clock::now().time_since_epoch().count();
  if (int none = 0; !signal_received.compare_exchange_strong(none, signal)) {
    const Clock::rep first = signal_time;
    if (signal != SIGINT && (first == 0 || Clock::duration(now - first) < kSameSignal)) return;
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    return;
  }
  signal_time = now;
  interrupt_flag = true;
  if (ends_soon) ::alarm(kGrace);
}

// Finished work is journaled at any time, so nothing needs to be saved here.
void on_alarm(int) {
  constexpr std::string_view kResumes =
      "\nreshard: error: ended by a signal while an operation was running; rerun the same command to resume\n";
  constexpr std::string_view kStartsOver =
      "\nreshard: error: ended by a signal while an operation was running; the same command starts over\n";
  const std::string_view text = can_be_resumed ? kResumes : kStartsOver;
  if (::write(STDERR_FILENO, text.data(), text.size()) < 0) ::_exit(128 + signal_received);
  ::_exit(128 + signal_received);
}

// Used by the program alone, which runs one command.
bool wants_json = false, has_answered = false;

std::string_view kind_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kUsage:
      return "usage";
    case ErrorCode::kCorrupt:
      return "corrupt";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kIo:
      return "io";
    default:
      return code == ErrorCode::kPeer ? "rank" : "internal";
  }
}

bool no_color() {
  const char *no_color = std::getenv("NO_COLOR"), *terminal = std::getenv("TERM");
  return (no_color != nullptr && *no_color != '\0') || (terminal != nullptr && std::string_view(terminal) == "dumb");
}

}  // namespace

bool stdout_has_color() { return stdout_is_terminal() && !no_color(); }
bool stdout_is_terminal() { return ::isatty(STDOUT_FILENO); }
bool stderr_is_terminal() { return ::isatty(STDERR_FILENO); }

std::string colored(std::string_view text, const char* code) {
  if (!stdout_has_color()) return std::string(text);
  return std::string("\x1b[") + code + "m" + std::string(text) + "\x1b[0m";
}

std::size_t width_of(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
}

std::string padded(std::string_view raw, std::size_t width) {
  std::string text = printable(raw);
  const std::size_t n = width_of(text);
  if (n < width) text.append(width - n, ' ');
  return text;
}

std::size_t screen_width(std::size_t otherwise) {
  constexpr long kNarrowest = 60, kWidest = 200;
  long columns = 0;
  if (const char* given = std::getenv("COLUMNS")) columns = std::strtol(given, nullptr, 10);
  winsize size{};
  if (columns <= 0 && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) columns = size.ws_col;
  return columns <= 0 ? otherwise : static_cast<std::size_t>(std::clamp(columns, kNarrowest, kWidest));
}

std::string wrapped(std::string_view text, std::size_t indent, std::size_t start, std::size_t screen) {
  std::string out;
  std::size_t at = start;
  bool is_first = true;
  for (const std::string& word : split(printable_lines(text), ' ')) {
    const std::size_t n = width_of(word);
    if (!is_first && at + 1 + n > screen) {
      out += "\n" + std::string(indent, ' ');
      at = indent;
    } else if (!is_first) {
      out += ' ';
      ++at;
    }
    out += word;
    at += n;
    is_first = false;
  }
  return out;
}

std::string in_column(std::string_view text, std::size_t indent, std::size_t start) {
  return wrapped(text, indent, std::max(indent, start), screen_width());
}

Json dims_json(const Dims& dims) {
  Json out = Json::array();
  for (const Index n : dims) out.push_back(n);
  return out;
}

Json answer_json(std::string_view command) {
  return Json::object().set("schema", "reshard." + std::string(command) + "/1");
}

void set_json_errors(bool are_wanted) { wants_json = are_wanted; }

int report_error(const Error& error, const std::string& rank) {
  std::fflush(stdout);
  std::fprintf(stderr, "reshard%s: error: ", rank.c_str());
  print_lines(stderr, error.message());
  std::fputc('\n', stderr);
  const int code = static_cast<int>(error.code());
  if (!wants_json || has_answered) return code;
  try {
    Json json = Json::object();
    json.set("kind", kind_of(error.code())).set("message", error.message()).set("exit_code", code);
    show_json(answer_json("error").set("error", std::move(json)), 2);
  } catch (const std::bad_alloc&) {
    // The message on standard error must suffice.
  }
  return code;
}

void show_json(const Json& json, int depth) {
  if (!host()) has_answered = true;  // other threads may be in calls of the Python module
  std::string text = printable_json(to_text(json, depth));
  if (host())
    host()->answer = std::move(text);
  else
    std::printf("%s\n", text.c_str());
}

void show_json(const Json& object, const JsonList& list, int depth) {
  std::string* const answer = host() ? &host()->answer : nullptr;
  if (!host()) has_answered = true;
  if (answer) answer->clear();
  write_text(object, list, depth, [answer](std::string_view text) {
    const std::string shown = printable_json(text);
    if (answer)
      answer->append(shown);
    else
      std::fwrite(shown.data(), 1, shown.size(), stdout);
  });
  if (!answer) std::printf("\n");
}

void print_row(std::string_view label, std::string_view text) {
  std::printf("%-9.*s %s\n", static_cast<int>(label.size()), label.data(), printable_lines(text).c_str());
}

// Not from getrusage(), whose maximum survives exec and may be that of the parent program.
Index peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return static_cast<Index>(std::strtoll(line.c_str() + 6, nullptr, 10)) * 1024;
  return 0;
}

const std::atomic<bool>& interrupted() {
  if (host()) return *host()->interrupt;
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_handler = on_signal;
    ::sigaction(SIGINT, &action, nullptr);
    ::sigaction(SIGTERM, &action, nullptr);
    struct sigaction hangup {};
    ::sigaction(SIGHUP, nullptr, &hangup);
    if (hangup.sa_handler != SIG_IGN) ::sigaction(SIGHUP, &action, nullptr);  // not under nohup
    return true;
  }();
  (void)installed;
  return interrupt_flag;
}

int ending_signal() { return signal_received; }

void end_soon_after_signal(bool can_resume) {
  can_be_resumed = can_resume;
  struct sigaction action {};
  action.sa_handler = on_alarm;
  ::sigaction(SIGALRM, &action, nullptr);
  ends_soon = true;
}

struct Progress::State {
  const Host* host = nullptr;
  std::string label;
  Index total = 0;
  bool bar = false;
  std::mutex mutex;
  Clock::time_point start = Clock::now();
  Clock::time_point last = start;
  bool drawn = false;

  void draw(Index done) const {
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const double rate = seconds > 0 ? static_cast<double>(done) / seconds : 0;
    const double share = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 1;
    const double left = rate > 0 ? static_cast<double>(total - done) / rate : 0;
    const std::string text = human_bytes(done) + " of " + human_bytes(total) + "   " +
                             human_bytes(static_cast<Index>(rate)) + "/s   " + human_seconds(left) + " left";
    if (!bar) {
      std::fprintf(stderr, "%-9s %3.0f %%   %s\n", label.c_str(), 100 * share, text.c_str());
      return;
    }
    constexpr int kBarWidth = 24;
    std::string blocks;
    for (int i = 0; i < kBarWidth; ++i) blocks += i < share * kBarWidth ? "█" : "·";
    std::fprintf(stderr, "\r%-9s %s %3.0f %%   %s\x1b[K", label.c_str(), blocks.c_str(), 100 * share, text.c_str());
    std::fflush(stderr);
  }
};

Progress::Progress(std::string label, Index total, bool quiet) {
  if (quiet && !host()) return;
  state_ = std::make_unique<State>();
  state_->host = host();
  state_->label = std::move(label);
  state_->total = total;
  if (state_->host) return;
  state_->bar = stderr_is_terminal();
  job().listen([this](Index done) { show(done); });
}

Progress::~Progress() {
  if (state_ && !state_->host) job().listen(nullptr);
  if (state_ && state_->drawn && state_->bar) std::fprintf(stderr, "\r\x1b[K");
}

void Progress::update(Index done) {
  if (state_ && state_->host)
    state_->host->progress(done, state_->total);
  else
    job().report(done);
}

void Progress::show(Index done) {
  const auto now = Clock::now();
  const std::unique_lock lock(state_->mutex, std::try_to_lock);
  if (!lock) return;
  const auto pause = state_->bar ? std::chrono::milliseconds(100) : std::chrono::milliseconds(10'000);
  if (now - state_->last < pause) return;
  state_->last = now;
  state_->drawn = true;
  state_->draw(done);
}

}  // namespace reshard::tools
