#include "tests/support/one_gpu_ranks.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "lib/transport/waiting.h"
#include "tests/support/matching.h"

namespace reshard {
namespace {

// The control transport of NCCL's only rank, which reports whether the job is over.
class Control : public Transport {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  Result<std::unique_ptr<Transfer>> start(std::vector<Outgoing>, std::vector<Incoming>) override {
    return internal_error("a rank by itself has nobody to send to");
  }
  bool stopped() const override { return stopped_; }
  void stop() { stopped_ = true; }

 private:
  std::atomic<bool> stopped_{false};
};

// Messages that are sent together. Each rank that owns one of them waits for all.
class Sent {
 public:
  explicit Sent(std::unique_ptr<Transfer> transfer) : transfer_(std::move(transfer)) {}
  Status wait() {
    const std::lock_guard lock(mutex_);
    if (!done_) done_ = transfer_->wait();
    return *done_;
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<Transfer> transfer_;
  std::optional<Status> done_;
};

// The state that the ranks share. A message is sent when both of its ends are known.
class OneGpu {
 public:
  using Message = Matcher<std::shared_ptr<Sent>>::Message;

  OneGpu(std::unique_ptr<NcclRanks> nccl, Control& control, int size, double patience)
      : nccl_(std::move(nccl)), control_(control), size_(size), patience_(patience) {}
  int size() const { return size_; }
  bool stopped() const { return nccl_->stopped(); }

  Result<std::vector<Message>> start(int rank, const std::vector<Outgoing>& out, const std::vector<Incoming>& in) {
    const std::lock_guard lock(mutex_);
    if (control_.stopped()) return job_is_over();  // a rank that stopped waiting may have freed its buffers
    auto ends = matcher_.add(rank, size_, out, in);
    if (!ends) return std::move(ends).error();
    std::vector<Outgoing> sent;
    std::vector<Incoming> wanted;
    for (const Message& message : ends->complete) {
      sent.push_back({0, message->from});
      wanted.push_back({0, message->to});
    }
    if (sent.empty()) return std::move(ends->mine);
    const auto together = std::make_shared<Sent>(TRY(nccl_->start(std::move(sent), std::move(wanted))));
    for (const Message& message : ends->complete) message->state = together;
    changed_.notify_all();
    return std::move(ends->mine);
  }

  Status wait(const Message& message) {
    std::shared_ptr<Sent> sent;
    {
      std::unique_lock lock(mutex_);
      const bool ready =
          changed_.wait_for(lock, patience_, [&] { return message->state != nullptr || control_.stopped(); });
      if (!ready) return Error(ErrorCode::kPeer, "nccl: a message: its other end never came");
      if (!message->state) return job_is_over();
      sent = message->state;
    }
    return sent->wait();
  }

  void stop() {
    control_.stop();
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

 private:
  std::unique_ptr<NcclRanks> nccl_;
  Control& control_;
  int size_;
  std::chrono::duration<double> patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Matcher<std::shared_ptr<Sent>> matcher_;
};

class OneGpuTransfer : public Transfer {
 public:
  OneGpuTransfer(OneGpu& gpu, std::vector<OneGpu::Message> messages) : gpu_(gpu), messages_(std::move(messages)) {}
  Status wait() override {
    for (const OneGpu::Message& message : messages_) TRY(gpu_.wait(message));
    return {};
  }

 private:
  OneGpu& gpu_;
  std::vector<OneGpu::Message> messages_;
};

class OneGpuTransport : public Transport {
 public:
  OneGpuTransport(OneGpu& gpu, int rank) : gpu_(gpu), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return gpu_.size(); }
  bool moves_device_memory() const override { return true; }
  bool stopped() const override { return gpu_.stopped(); }
  Result<std::unique_ptr<Transfer>> start(std::vector<Outgoing> out, std::vector<Incoming> in) override {
    auto messages = TRY(gpu_.start(rank_, out, in));
    return std::unique_ptr<Transfer>(std::make_unique<OneGpuTransfer>(gpu_, std::move(messages)));
  }

 private:
  OneGpu& gpu_;
  int rank_;
};

}  // namespace

Status run_nccl_ranks_on_one_gpu(int n, const NcclOptions& options,
                                 const std::function<Status(Transport& ranks)>& work) {
  const NcclId id = TRY(make_nccl_id());
  Control control;
  OneGpu gpu(TRY(open_nccl(id, 0, 1, options, &control)), control, n, options.patience);
  std::vector<Status> results(static_cast<std::size_t>(n));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank)
    threads.emplace_back([&, rank] {
      OneGpuTransport transport(gpu, rank);
      Status& result = results[static_cast<std::size_t>(rank)];
      result = work(transport);
      if (!result) gpu.stop();
    });
  for (std::thread& t : threads) t.join();
  for (const bool by_itself : {true, false})
    for (Status& result : results)
      if (!result && (result.error().code() != ErrorCode::kPeer) == by_itself) return std::move(result);
  return {};
}

}  // namespace reshard
