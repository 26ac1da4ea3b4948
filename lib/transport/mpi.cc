// SPDX-License-Identifier: Apache-2.0
// Ranks as processes started by mpirun or srun, over any MPI of version 3 or later.
//
// Messages are non-blocking sends and receives, in parts of at most 1 GiB because MPI counts are ints. All waiting is
// polling, so that a waiting rank learns of another's failure. Two threads call MPI, the one that works and the one
// that keeps in touch, one at a time (MPI_THREAD_SERIALIZED).
//
// The library is loaded when ranks are needed: a program that runs alone needs neither the library nor the time to load
// it.
#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lib/base/catch_exceptions.h"
#include "lib/base/find_function.h"
#include "lib/transport/job.h"
#include "lib/transport/waiting.h"

namespace reshard {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kMaxPart = std::size_t{1} << 30;
// Time to report the reason after the launcher's signal: Open MPI kills the process one second later.
constexpr milliseconds kLastWords{500};
constexpr milliseconds kBetweenSums{50};

// The functions that are used, without the prefix "MPI_".
#define RESHARD_MPI_FUNCTIONS(each)                                                                                    \
  each(Abort) each(Cancel) each(Comm_dup) each(Comm_rank) each(Comm_set_errhandler) each(Comm_size) each(Error_string) \
      each(Finalize) each(Get_library_version) each(Iallreduce) each(Init_thread) each(Irecv) each(Isend) each(Test)   \
          each(Testall)

struct Library {
#define RESHARD_DECLARE(name) decltype(&::MPI_##name) name = nullptr;  // NOLINT(bugprone-macro-parentheses)
  RESHARD_MPI_FUNCTIONS(RESHARD_DECLARE)
#undef RESHARD_DECLARE
  void* opened = nullptr;
};

Result<Library> load_library() {
  Library out;
  // Open MPI's plugins look up its symbols among the global ones.
  // The second is the library's path at build time.
  out.opened = TRY(open_library({RESHARD_MPI_NAME, RESHARD_MPI_LIBRARY}, "MPI: cannot open " RESHARD_MPI_NAME,
                                RTLD_NOW | RTLD_GLOBAL));
#define RESHARD_FIND(name) TRY(find_function(out.opened, RESHARD_MPI_NAME, "MPI_" #name, out.name));
  RESHARD_MPI_FUNCTIONS(RESHARD_FIND)
#undef RESHARD_FIND
#ifdef OMPI_PREDEFINED_GLOBAL
  if (!::dlsym(out.opened, "ompi_mpi_comm_world"))
    return unsupported("MPI: " RESHARD_MPI_NAME " is not the Open MPI that reshard was built with");
#endif
  return out;
}

// Loads the library once; it is never unloaded.
const Result<Library>& library() {
  static const Result<Library> loaded = load_library();
  return loaded;
}

// Requires that join_mpi_job() has loaded the library.
const Library& lib() { return *library(); }

// Open MPI's constants are addresses inside the library.
#ifdef OMPI_PREDEFINED_GLOBAL
#undef OMPI_PREDEFINED_GLOBAL
#define OMPI_PREDEFINED_GLOBAL(type, global) static_cast<type>(::dlsym(lib().opened, #global))
#endif

std::mutex& mpi_mutex() {
  static std::mutex mutex;
  return mutex;
}

// Calls an MPI function under the lock and returns its error as a Status.
template <class Call>
Status mpi(const char* what, Call call) {
  const std::lock_guard lock(mpi_mutex());
  const int code = call();
  if (code == MPI_SUCCESS) return {};
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  lib().Error_string(code, text.data(), &length);
  return Error(ErrorCode::kPeer, std::string("MPI: ") + what + ": " + text.data());
}

class MpiTransport : public Transport {
 public:
  MpiTransport(MPI_Comm comm, int rank, int size) : comm_(comm), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool stopped() const override { return stopped_; }
  Result<std::unique_ptr<Transfer>> start(std::vector<Outgoing> out, std::vector<Incoming> in) override;

  void stop() { stopped_ = true; }
  void abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }  // whether messages were left in flight

 private:
  MPI_Comm comm_;
  int rank_, size_;
  std::atomic<bool> stopped_{false}, abandoned_{false};
};

class MpiTransfer : public Transfer {
 public:
  explicit MpiTransfer(MpiTransport& transport) : transport_(transport) {}
  // After an error: cancels what can be cancelled, so that MPI does not write to memory that the caller owns again.
  ~MpiTransfer() override {
    if (done_) return;
    for (std::size_t i = 0; i < requests_.size(); ++i)
      if (i < received_) (void)mpi("Cancel", [&] { return lib().Cancel(&requests_[i]); });
    int all = 0;
    for (int look = 0; look < kLastLooks && all == 0; ++look) (void)test(&all);
    if (all == 0) transport_.abandon();
  }

  Status wait() override {
    Pause pause;
    while (!requests_.empty()) {
      int all = 0;
      TRY(test(&all));
      if (all != 0) break;
      if (transport_.stopped()) return job_is_over();
      pause();
    }
    done_ = true;
    return {};
  }

  MPI_Request& add_receive() {
    ++received_;
    return requests_.emplace_back(MPI_REQUEST_NULL);
  }
  MPI_Request& add_send() { return requests_.emplace_back(MPI_REQUEST_NULL); }

 private:
  static constexpr int kLastLooks = 100;
  Status test(int* all) {
    return mpi("Testall", [&] {
      return lib().Testall(static_cast<int>(requests_.size()), requests_.data(), all, MPI_STATUSES_IGNORE);
    });
  }

  MpiTransport& transport_;
  std::vector<MPI_Request> requests_;  // receives first
  std::size_t received_ = 0;
  bool done_ = false;
};

Result<std::unique_ptr<Transfer>> MpiTransport::start(std::vector<Outgoing> out, std::vector<Incoming> in) {
  if (stopped_) return job_is_over();
  auto transfer = std::make_unique<MpiTransfer>(*this);
  const auto in_parts = [](auto bytes, auto each) -> Status {
    for (std::size_t at = 0; at < bytes.size(); at += kMaxPart) {
      const auto part = bytes.subspan(at, std::min(kMaxPart, bytes.size() - at));
      TRY(each(part.data(), static_cast<int>(part.size())));
    }
    return {};
  };
  for (const Incoming& message : in)
    TRY(in_parts(message.bytes, [&](std::byte* to, int n) {
      return mpi("Irecv",
                 [&] { return lib().Irecv(to, n, MPI_BYTE, message.peer, 0, comm_, &transfer->add_receive()); });
    }));
  for (const Outgoing& message : out)
    TRY(in_parts(message.bytes, [&](const std::byte* from, int n) {
      return mpi("Isend",
                 [&] { return lib().Isend(from, n, MPI_BYTE, message.peer, 0, comm_, &transfer->add_send()); });
    }));
  return std::unique_ptr<Transfer>(std::move(transfer));
}

class MpiJob : public Job {
 public:
  MpiJob(const JobOptions& options, MPI_Comm control, std::unique_ptr<MpiTransport> transport)
      : options_(options), control_(control), transport_(std::move(transport)) {}

  Transport* ranks() override { return transport_.get(); }
  Result<int> run(const std::function<Result<int>()>& work) override;
  bool is_broken() const override { return broken_; }
  void report(Index done) override { done_ = done; }
  void listen(std::function<void(Index done)> listener) override {
    const std::lock_guard lock(listener_mutex_);
    listener_ = std::move(listener);
    done_ = 0;
  }
  int end(int exit_code) override;

 private:
  Status await(MPI_Request request);
  template <class T>
  Status combine(std::vector<T>& values, MPI_Datatype type, MPI_Op op);
  Status keep_in_touch();
  bool wait_for_end(Clock::duration time);
  Result<int> verdict();
  Error lost(const Error& why) const;
  bool failed_by_itself() const { return !*result_ && result_->error().code() != ErrorCode::kPeer; }

  JobOptions options_;
  MPI_Comm control_;
  std::unique_ptr<MpiTransport> transport_;
  bool broken_ = false;  // a rank does not answer, so MPI can only be aborted
  std::atomic<Index> done_{0};
  std::mutex listener_mutex_;
  std::function<void(Index done)> listener_;
  std::mutex end_mutex_;
  std::condition_variable end_;
  std::optional<Result<int>> result_;  // of this rank's work, once it has finished
  std::vector<std::shared_ptr<void>> unfinished_;
};

// Waits for a keep-in-touch reduction. Only dead ranks exceed the patience, because the threads that answer do nothing
// else.
Status MpiJob::await(MPI_Request request) {
  auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.patience));
  bool interrupted = false;
  for (Pause pause;; pause()) {
    int all = 0;
    TRY(mpi("Test", [&] { return lib().Test(&request, &all, MPI_STATUS_IGNORE); }));
    if (all != 0) return {};
    if (!interrupted && options_.interrupt && *options_.interrupt) {
      interrupted = true;
      deadline = std::min(deadline, Clock::now() + kLastWords);
    }
    if (Clock::now() < deadline) continue;
    broken_ = true;
    char text[160];
    std::snprintf(text, sizeof text, "%s", "interrupted, probably because another rank was killed");
    if (!interrupted)
      std::snprintf(text, sizeof text,
                    "another rank did not respond for %.0f s: its process was killed, or its machine or network "
                    "failed",
                    options_.patience);
    return Error(ErrorCode::kPeer, text);
  }
}

template <class T>
Status MpiJob::combine(std::vector<T>& values, MPI_Datatype type, MPI_Op op) {
  auto buffers = std::make_shared<std::pair<std::vector<T>, std::vector<T>>>(values, values);
  MPI_Request request = MPI_REQUEST_NULL;
  TRY(mpi("Iallreduce", [&] {
    return lib().Iallreduce(buffers->first.data(), buffers->second.data(), static_cast<int>(values.size()), type, op,
                            control_, &request);
  }));
  Status ended = await(request);
  values = buffers->second;
  // MPI may still write to these if an unresponsive rank comes back.
  if (!ended) unfinished_.push_back(std::move(buffers));
  return ended;
}

bool MpiJob::wait_for_end(Clock::duration time) {
  std::unique_lock lock(end_mutex_);
  return end_.wait_for(lock, time, [&] { return result_.has_value(); });
}

// Reduces until every rank's work has finished.
Status MpiJob::keep_in_touch() {
  while (true) {
    const bool ended = wait_for_end(kBetweenSums);
    std::vector<std::int64_t> sums = {ended ? 0 : 1, ended && !*result_ ? 1 : 0, done_};
    TRY(combine(sums, MPI_INT64_T, MPI_SUM));
    if (sums[1] > 0) transport_->stop();
    {
      const std::lock_guard lock(listener_mutex_);
      if (listener_ && transport_->rank() == 0 && sums[2] > 0) listener_(sums[2]);
    }
    if (sums[0] == 0) return {};
  }
}

// Returns the common result, once all ranks have finished.
Result<int> MpiJob::verdict() {
  const int rank = transport_->rank(), size = transport_->size();
  // The lowest rank that failed by itself reports for all; if there is none, any rank that failed.
  std::vector<std::int64_t> who = {failed_by_itself() ? rank : INT_MAX, *result_ ? INT_MAX : rank};
  TRY(combine(who, MPI_INT64_T, MPI_MIN));
  std::vector<std::int64_t> most = {*result_ ? **result_ : 0, transport_->abandoned() ? 1 : 0};
  TRY(combine(most, MPI_INT64_T, MPI_MAX));
  if (most[1] > 0) transport_->abandon();
  const auto speaker = static_cast<int>(who[0] != INT_MAX ? who[0] : who[1]);
  if (speaker == INT_MAX) return static_cast<int>(most[0]);

  std::string text = rank == speaker ? result_->error().message() : "";
  std::vector<std::int64_t> length = {static_cast<std::int64_t>(text.size())};
  TRY(combine(length, MPI_INT64_T, MPI_MAX));
  text.resize(length[0]);
  std::vector<unsigned char> bytes(text.begin(), text.end());
  TRY(combine(bytes, MPI_UNSIGNED_CHAR, MPI_MAX));
  return Error(ErrorCode::kPeer, "rank " + std::to_string(speaker) + " of " + std::to_string(size) + ": " +
                                     std::string(bytes.begin(), bytes.end()));
}

// Returns the error for lost ranks, plus what this rank's own error says about leftovers on disk.
Error MpiJob::lost(const Error& why) const {
  const std::string over = job_is_over().message();
  const std::string said = *result_ ? "" : result_->error().message();
  return {why.code(), why.message() + (said.starts_with(over) ? said.substr(over.size()) : "")};
}

Result<int> MpiJob::run(const std::function<Result<int>()>& work) {
  std::thread worker([&] {
    Result<int> result = catch_exceptions(work);
    const std::lock_guard lock(end_mutex_);
    result_ = std::move(result);
    end_.notify_all();
  });
  Status touch = keep_in_touch();
  if (!touch) {
    transport_->stop();
    // The work notices at its next message or slab, unless it hangs in a call to a dead file server.
    if (!wait_for_end(broken_ ? Clock::duration(kLastWords) : Clock::duration(std::chrono::seconds(10)))) {
      worker.detach();
      return std::move(touch).error();
    }
  }
  worker.join();
  if (!touch) return lost(touch.error());
  return verdict();
}

int MpiJob::end(int exit_code) {
  std::fflush(nullptr);
  if (!broken_) {
    std::vector<std::int64_t> said = {1};
    if (!combine(said, MPI_INT64_T, MPI_SUM)) broken_ = true;
  }
  if (broken_) std::this_thread::sleep_for(kLastWords);  // let the others find and report the same
  if (broken_ || transport_->abandoned()) {
    lib().Abort(MPI_COMM_WORLD, exit_code);
    std::_Exit(exit_code);
  }
  lib().Finalize();
  return exit_code;
}

}  // namespace

Result<std::string> mpi_version() {
  if (!library()) return library().error();
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  if (lib().Get_library_version(text, &length) != MPI_SUCCESS)
    return unsupported("MPI: the library does not report its version");
  const std::string_view all(text, length);
  return std::string(all.substr(0, all.find_first_of(",\n")));
}

Result<std::unique_ptr<Job>> join_mpi_job(const JobOptions& options) {
  if (const Result<Library>& loaded = library(); !loaded) return loaded.error();
  int level = 0, rank = 0, size = 1;
  TRY(mpi("Init_thread", [&] { return lib().Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level); }));
  if (level < MPI_THREAD_SERIALIZED)
    return unsupported("this MPI does not support calls from several threads (expected MPI_THREAD_SERIALIZED)");
  MPI_Comm control = MPI_COMM_NULL, data = MPI_COMM_NULL;
  for (MPI_Comm* comm : {&control, &data}) {
    TRY(mpi("Comm_dup", [&] { return lib().Comm_dup(MPI_COMM_WORLD, comm); }));
    TRY(mpi("Comm_set_errhandler", [&] { return lib().Comm_set_errhandler(*comm, MPI_ERRORS_RETURN); }));
  }
  lib().Comm_rank(data, &rank);
  lib().Comm_size(data, &size);
  if (size == 1) {
    // A job of one needs no MPI; finalize it properly.
    lib().Finalize();
    return job_of_one();
  }
  return std::unique_ptr<Job>(
      std::make_unique<MpiJob>(options, control, std::make_unique<MpiTransport>(data, rank, size)));
}

}  // namespace reshard
