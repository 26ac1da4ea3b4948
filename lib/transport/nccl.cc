// SPDX-License-Identifier: Apache-2.0
// A transfer is one group of sends and receives of bytes, cut into parts of at most 1 GiB, on the communicator's own
// stream. Nothing blocks: the communicator is non-blocking, and waiting polls events, the communicator's errors, the
// job and the clock. A rank that gives up aborts the communicator, which ends its kernels. A separate thread also
// watches the job: a kernel that waits for a failed rank prevents CUDA from freeing memory, so a thread that frees
// memory cannot poll.
#include "lib/transport/nccl.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <future>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "lib/base/cursor.h"
#include "lib/base/find_function.h"
#include "lib/base/machine.h"
#include "lib/base/memory_limit.h"
#include "lib/base/text.h"
#include "lib/device/cuda/context.h"
#include "lib/transport/collectives.h"
#include "lib/transport/waiting.h"

namespace reshard {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMaxPart = std::size_t{1} << 30;
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);  // polling interval of the thread that watches the job
constexpr auto kStuck = std::chrono::seconds(1);               // an NCCL call that takes longer is waiting for a kernel
constexpr auto kLastWords = std::chrono::seconds(5);           // an abort that takes longer is left running

// The library's file name.
#ifndef RESHARD_NCCL_NAME
#define RESHARD_NCCL_NAME "libnccl.so.2"
#endif

// The functions that are used.
struct Library {
  decltype(&::ncclGetErrorString) error_string = nullptr;
  decltype(&::ncclGetVersion) version = nullptr;
  decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&::ncclCommInitRankConfig) init = nullptr;
  decltype(&::ncclCommGetAsyncError) async_error = nullptr;
  decltype(&::ncclCommFinalize) finalize = nullptr;
  decltype(&::ncclCommDestroy) destroy = nullptr;
  decltype(&::ncclCommAbort) abort = nullptr;
  decltype(&::ncclGroupStart) group_start = nullptr;
  decltype(&::ncclGroupEnd) group_end = nullptr;
  decltype(&::ncclSend) send = nullptr;
  decltype(&::ncclRecv) receive = nullptr;
};

Result<Library> load_library() {
  // The second is its path when this was built.
  void* const library =
      TRY(open_library({RESHARD_NCCL_NAME, RESHARD_NCCL_LIBRARY}, "nccl: cannot open " RESHARD_NCCL_NAME));
  const std::string what = "nccl: " RESHARD_NCCL_NAME;
  Library out;
  TRY(find_function(library, what, "ncclGetErrorString", out.error_string));
  TRY(find_function(library, what, "ncclGetVersion", out.version));
  TRY(find_function(library, what, "ncclGetUniqueId", out.get_unique_id));
  TRY(find_function(library, what, "ncclCommInitRankConfig", out.init));
  TRY(find_function(library, what, "ncclCommGetAsyncError", out.async_error));
  TRY(find_function(library, what, "ncclCommFinalize", out.finalize));
  TRY(find_function(library, what, "ncclCommDestroy", out.destroy));
  TRY(find_function(library, what, "ncclCommAbort", out.abort));
  TRY(find_function(library, what, "ncclGroupStart", out.group_start));
  TRY(find_function(library, what, "ncclGroupEnd", out.group_end));
  TRY(find_function(library, what, "ncclSend", out.send));
  TRY(find_function(library, what, "ncclRecv", out.receive));
  return out;
}

// Loads the library once; it is never unloaded.
const Result<Library>& library() {
  static const Result<Library> loaded = load_library();
  return loaded;
}

Status nccl_status(const Library& nccl, ncclResult_t code, const std::string& doing) {
  if (code == ncclSuccess) return {};
  return Error(code == ncclRemoteError ? ErrorCode::kPeer : ErrorCode::kIo,
               "nccl: " + doing + ": " + nccl.error_string(code));
}

using ContextPtr = std::shared_ptr<const CudaContext>;

// A point in the communicator's stream.
class Event {
 public:
  static Result<std::shared_ptr<Event>> record(const ContextPtr& context, cudaStream_t stream) {
    std::shared_ptr<Event> out(new Event(context));
    TRY(context->run("recording an event", [&] {
      const cudaError_t made = cudaEventCreateWithFlags(&out->event_, cudaEventDisableTiming);
      return made == cudaSuccess ? cudaEventRecord(out->event_, stream) : made;
    }));
    return out;
  }
  ~Event() {
    static_cast<void>(context_->run("parting", [&] { return event_ ? cudaEventDestroy(event_) : cudaSuccess; }));
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // Returns whether the point is reached, or an error of anything queued before it.
  Result<bool> reached() const {
    bool waits = false;
    TRY(context_->run("waiting for messages", [&] {
      const cudaError_t code = cudaEventQuery(event_);
      waits = code == cudaErrorNotReady;
      if (!waits) return code;
      static_cast<void>(cudaGetLastError());  // clear it: it is not an error of the next kernel
      return cudaSuccess;
    }));
    return !waits;
  }

 private:
  explicit Event(ContextPtr context) : context_(std::move(context)) {}
  ContextPtr context_;
  cudaEvent_t event_ = nullptr;
};

// One side of a message.
struct End {
  bool send = false;
  int peer = 0;
  std::byte* bytes = nullptr;
  std::size_t size = 0;
};

// A communicator and its stream. Thread-safe.
class Communicator {
 public:
  static Result<std::unique_ptr<Communicator>> open(const NcclId& id, int rank, int size, const NcclOptions& options,
                                                    const Transport* control) {
    static DriverMemory driver_memory;
    const DriverMemory::Opening opening(driver_memory);
    const Result<Library>& loaded = library();
    if (!loaded) return loaded.error();
    ContextPtr context = TRY(CudaContext::retain(options.device).context("nccl"));
    std::unique_ptr<Communicator> out(new Communicator(*loaded, std::move(context), options.patience, control));
    TRY(out->context_->run("creating a stream",
                           [&] { return cudaStreamCreateWithFlags(&out->stream_, cudaStreamNonBlocking); }));
    ncclUniqueId unique;
    static_assert(sizeof(unique) == sizeof(NcclId));
    std::memcpy(&unique, id.data(), sizeof(unique));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    {
      const CudaContext::Current current(*out->context_);
      const std::lock_guard lock(out->mutex_);
      ncclComm_t comm = nullptr;
      const ncclResult_t code = loaded->init(&comm, size, unique, rank, &config);
      out->comm_ = comm;
      TRY(out->finish(code, "connecting"));
    }
    if (control) out->watcher_ = std::thread([comm = out.get()] { comm->watch(); });
    return out;
  }

  ~Communicator() {
    closing_ = true;
    if (watcher_.joinable()) watcher_.join();
    abort();
    if (aborting_.valid()) static_cast<void>(aborting_.wait_until(std::min(from_now(), Clock::now() + kLastWords)));
    static_cast<void>(context_->run("parting", [&] { return stream_ ? cudaStreamDestroy(stream_) : cudaSuccess; }));
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  Status part() {
    const CudaContext::Current current(*context_);
    const std::lock_guard lock(mutex_);
    if (!comm_) return job_is_over();
    TRY(finish(nccl_.finalize(comm_), "parting"));
    if (ncclComm_t comm = comm_.exchange(nullptr)) static_cast<void>(nccl_.destroy(comm));
    return {};
  }

  // Queues messages as one group and returns the event of their completion.
  Result<std::shared_ptr<Event>> post(const std::vector<End>& ends) {
    const CudaContext::Current current(*context_);
    const std::lock_guard lock(mutex_);
    if (!comm_) return job_is_over();
    TRY(finish(nccl_.group_start(), "starting a group"));
    Status queued;
    for (const End& end : ends)
      if (queued) queued = queue(end);
    // A group that was started must be ended even after an error.
    TRY(finish(nccl_.group_end(), "ending a group"));
    TRY(std::move(queued));
    return Event::record(context_, stream_);
  }

  // Returns once the event is reached, or with an error, at the latest after the time allowed for a transfer.
  Status wait(const Event& event) {
    const Clock::time_point deadline = from_now();
    for (Pause pause;; pause()) {
      const Result<bool> reached = event.reached();
      const std::lock_guard lock(mutex_);
      // Kernels of an aborted communicator end early, and their events look successful.
      if (!comm_) return job_is_over();
      if (!reached.has_value()) return give_up(reached.error());
      if (*reached) return {};
      ncclResult_t async = ncclSuccess;
      const ncclResult_t asked = nccl_.async_error(comm_, &async);
      if (auto status = nccl_status(nccl_, asked != ncclSuccess ? asked : async, "moving messages"); !status)
        return give_up(std::move(status).error());
      TRY(keep_waiting(deadline, "messages"));
    }
  }

  // Aborts all transfers, also for threads waiting in wait(). If an NCCL call holds the lock for long, only this abort
  // can end it; NCCL allows the abort from another thread.
  void abort() {
    const std::unique_lock lock(mutex_, kStuck);
    abort_now();
  }
  bool aborted() const { return aborted_; }
  Clock::time_point from_now() const {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(patience_));
  }

 private:
  Communicator(const Library& nccl, ContextPtr context, double patience, const Transport* control)
      : nccl_(nccl), context_(std::move(context)), patience_(patience), control_(control) {}

  void watch() {
    for (; !closing_; std::this_thread::sleep_for(kBetweenLooks))
      if (control_->stopped()) return abort();
  }

  Status queue(const End& end) {
    for (std::size_t at = 0; at < end.size; at += kMaxPart) {
      const std::size_t part = std::min(kMaxPart, end.size - at);
      const ncclResult_t code = end.send ? nccl_.send(end.bytes + at, part, ncclUint8, end.peer, comm_, stream_)
                                         : nccl_.receive(end.bytes + at, part, ncclUint8, end.peer, comm_, stream_);
      if (code != ncclInProgress) TRY(nccl_status(nccl_, code, end.send ? "sending" : "receiving"));
    }
    return {};
  }

  // Waits until a call on a non-blocking communicator has completed.
  Status finish(ncclResult_t code, const std::string& doing) {
    const Clock::time_point deadline = from_now();
    for (Pause pause; code == ncclInProgress; pause()) {
      TRY(keep_waiting(deadline, doing));
      const ncclResult_t asked = nccl_.async_error(comm_, &code);
      if (asked != ncclSuccess) code = asked;
    }
    if (auto status = nccl_status(nccl_, code, doing); !status) return give_up(std::move(status).error());
    return {};
  }

  Status keep_waiting(Clock::time_point deadline, const std::string& what) {
    if (aborted_ || is_over()) return give_up(job_is_over());
    if (Clock::now() < deadline) return {};
    char text[80];
    std::snprintf(text, sizeof text, ": no response for %.0f s", patience_);
    return give_up({ErrorCode::kPeer, "nccl: " + what + text});
  }

  bool is_over() const { return control_ && control_->stopped(); }

  // Aborts. If the job is over, returns that as the reason, because the local error is only a consequence.
  Error give_up(Error why) {
    abort_now();
    return is_over() ? job_is_over() : std::move(why);
  }
  // Runs the abort on a separate thread, because it may block, and on this GPU, because NCCL returns to the device it
  // was called on.
  void abort_now() {
    aborted_ = true;
    const ncclComm_t comm = comm_.exchange(nullptr);
    if (!comm) return;
    auto ended = std::make_shared<std::promise<void>>();
    aborting_ = ended->get_future();
    auto end = [abort = nccl_.abort, context = context_, comm, ended]() mutable {
      {
        const CudaContext::Current current(*context);
        static_cast<void>(abort(comm));
      }
      context = nullptr;
      ended->set_value();
    };
    try {
      std::thread(end).detach();
    } catch (const std::system_error&) {  // no thread available
      end();
    }
  }

  const Library& nccl_;
  ContextPtr context_;
  double patience_;
  const Transport* control_;
  std::timed_mutex mutex_;
  std::atomic<ncclComm_t> comm_ = nullptr;  // null: aborted or parted
  cudaStream_t stream_ = nullptr;
  std::atomic<bool> aborted_{false}, closing_{false};
  std::future<void> aborting_;
  std::thread watcher_;
};

std::byte* writable(Bytes bytes) { return const_cast<std::byte*>(bytes.data()); }

class NcclTransfer : public Transfer {
 public:
  NcclTransfer(Communicator& comm, std::shared_ptr<Event> done) : comm_(comm), done_(std::move(done)) {}
  // Nobody waited for this transfer, and its memory is about to be reused.
  ~NcclTransfer() override {
    if (!waited_for_) comm_.abort();
  }
  NcclTransfer(const NcclTransfer&) = delete;
  NcclTransfer& operator=(const NcclTransfer&) = delete;

  Status wait() override {
    waited_for_ = true;
    return comm_.wait(*done_);
  }

 private:
  Communicator& comm_;
  std::shared_ptr<Event> done_;
  bool waited_for_ = false;
};

class NcclTransport : public NcclRanks {
 public:
  NcclTransport(std::unique_ptr<Communicator> comm, int rank, int size, const Transport* control)
      : comm_(std::move(comm)), rank_(rank), size_(size), control_(control) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool moves_device_memory() const override { return true; }
  Status part() override { return comm_->part(); }
  bool stopped() const override { return comm_->aborted() || (control_ && control_->stopped()); }

  Result<std::unique_ptr<Transfer>> start(std::vector<Outgoing> out, std::vector<Incoming> in) override {
    std::vector<End> ends;
    for (const Outgoing& message : out)
      ends.push_back({true, message.peer, writable(message.bytes), message.bytes.size()});
    for (const Incoming& message : in)
      ends.push_back({false, message.peer, message.bytes.data(), message.bytes.size()});
    auto done = TRY(comm_->post(ends));
    return std::unique_ptr<Transfer>(std::make_unique<NcclTransfer>(*comm_, std::move(done)));
  }

 private:
  std::unique_ptr<Communicator> comm_;
  int rank_, size_;
  const Transport* control_;
};

}  // namespace

Result<std::string> nccl_version() {
  if (!library()) return library().error();
  int v = 0;
  TRY(nccl_status(*library(), library()->version(&v), "querying the version"));
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

Result<NcclId> make_nccl_id() {
  const Result<Library>& loaded = library();
  if (!loaded) return loaded.error();
  ncclUniqueId unique;
  TRY(nccl_status(*loaded, loaded->get_unique_id(&unique), "creating an ID"));
  NcclId id;
  std::memcpy(id.data(), &unique, sizeof(unique));
  return id;
}

Result<std::unique_ptr<NcclRanks>> open_nccl(const NcclId& id, int rank, int size, const NcclOptions& options,
                                             const Transport* control) {
  auto comm = TRY(Communicator::open(id, rank, size, options, control));
  return std::unique_ptr<NcclRanks>(std::make_unique<NcclTransport>(std::move(comm), rank, size, control));
}

Result<std::unique_ptr<NcclRanks>> open_nccl(Transport& control, const NcclOptions& options) {
  NcclId id{};
  std::string sent;
  if (control.rank() == 0) {
    id = TRY(make_nccl_id());
    sent = as_string(id);
  }
  const std::string got = TRY(broadcast(&control, std::move(sent)));
  if (got.size() != id.size())
    return internal_error("nccl: id: expected " + bytes_of(std::ssize(id)) + ", got " + std::to_string(got.size()));
  std::memcpy(id.data(), got.data(), id.size());
  return open_nccl(id, control.rank(), control.size(), options, &control);
}

NcclMember nccl_member(int device) {
  NcclMember out;
  out.machine = host_name();
  cudaDeviceProp properties;
  if (device < 0) {
    out.why = "no GPU";
  } else if (const Status asked =
                 cuda_status(device, cudaGetDeviceProperties(&properties, device), "querying its properties");
             !asked) {
    out.why = asked.error().message();
  } else if (!library()) {
    out.why = library().error().message();
  } else {
    out.gpu = "GPU";
    for (const char byte : properties.uuid.bytes) {
      char digits[3];
      std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
      out.gpu += (out.gpu.size() == 3 ? "-" : "") + std::string(digits);
    }
  }
  return out;
}

}  // namespace reshard
