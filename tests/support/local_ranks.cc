#include "tests/support/local_ranks.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "lib/base/checked.h"
#include "lib/transport/waiting.h"

namespace reshard {
namespace {

// Messages in flight between the ranks. A message is identified by its sender, its receiver and its number between the
// two.
struct Hub {
  using Key = std::tuple<int, int, Index>;
  explicit Hub(int ranks) : changed(static_cast<std::size_t>(ranks)) {}
  std::mutex mutex;
  std::vector<std::condition_variable>
      changed;  // one per rank, so that a message does not wake thousands of other ranks
  std::map<Key, Bytes> waiting;
  std::atomic<bool> stopped{false};

  std::condition_variable& changed_for(int rank) { return changed[static_cast<std::size_t>(rank)]; }
  void stop() {
    const std::lock_guard lock(mutex);
    stopped = true;
    for (std::condition_variable& of_rank : changed) of_rank.notify_all();
  }
};

class LocalTransfer : public Transfer {
 public:
  LocalTransfer(Hub& hub, int rank, std::vector<Hub::Key> out, std::vector<std::pair<Hub::Key, MutableBytes>> in)
      : hub_(hub), rank_(rank), out_(std::move(out)), in_(std::move(in)) {}

  Status wait() override {
    for (const auto& wanted : in_) {
      const Hub::Key& key = wanted.first;
      const MutableBytes to = wanted.second;
      std::unique_lock lock(hub_.mutex);
      hub_.changed_for(rank_).wait(lock, [&] { return hub_.stopped || hub_.waiting.contains(key); });
      // The buffers of waiting messages may already have been freed by a sender that gave up.
      if (hub_.stopped) return job_is_over();
      const auto message = hub_.waiting.find(key);
      if (message->second.size() != to.size())
        return internal_error("rank " + std::to_string(std::get<0>(key)) + " sent " +
                              std::to_string(message->second.size()) + " bytes where " + std::to_string(to.size()) +
                              " were expected");
      std::memcpy(to.data(), message->second.data(), to.size());
      hub_.waiting.erase(message);
      hub_.changed_for(std::get<0>(key)).notify_all();
    }
    for (const Hub::Key& key : out_) {
      std::unique_lock lock(hub_.mutex);
      hub_.changed_for(rank_).wait(lock, [&] { return hub_.stopped || !hub_.waiting.contains(key); });
      if (hub_.waiting.contains(key)) return job_is_over();
    }
    return {};
  }

 private:
  Hub& hub_;
  int rank_;
  std::vector<Hub::Key> out_;
  std::vector<std::pair<Hub::Key, MutableBytes>> in_;
};

class LocalTransport : public Transport {
 public:
  LocalTransport(Hub& hub, int rank, int size)
      : hub_(hub), rank_(rank), size_(size), sent_(static_cast<std::size_t>(size)), got_(sent_) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool stopped() const override { return hub_.stopped; }

  Result<std::unique_ptr<Transfer>> start(std::vector<Outgoing> out, std::vector<Incoming> in) override {
    std::vector<Hub::Key> sent;
    std::vector<std::pair<Hub::Key, MutableBytes>> wanted;
    const std::lock_guard lock(hub_.mutex);
    if (hub_.stopped) return job_is_over();
    for (const Outgoing& message : out) {
      if (message.bytes.empty()) continue;
      sent.emplace_back(rank_, message.peer, sent_.at(static_cast<std::size_t>(message.peer))++);
      hub_.waiting.emplace(sent.back(), message.bytes);
      hub_.changed_for(message.peer).notify_all();
    }
    for (const Incoming& message : in)
      if (!message.bytes.empty())
        wanted.emplace_back(Hub::Key{message.peer, rank_, got_.at(static_cast<std::size_t>(message.peer))++},
                            message.bytes);
    return std::unique_ptr<Transfer>(std::make_unique<LocalTransfer>(hub_, rank_, std::move(sent), std::move(wanted)));
  }

 private:
  Hub& hub_;
  int rank_, size_;
  std::vector<Index> sent_, got_;  // messages started, by peer
};

}  // namespace

Status run_local_ranks(int n, const std::function<Status(Transport& ranks)>& work, int* failed_rank) {
  Hub hub(n);
  std::vector<Status> results(static_cast<std::size_t>(n));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank)
    threads.emplace_back([&, rank] {
      LocalTransport transport(hub, rank, n);
      Status& result = results[static_cast<std::size_t>(rank)];
      result = work(transport);
      if (!result) hub.stop();
    });
  for (std::thread& t : threads) t.join();
  const auto failed = [&](bool by_itself) {
    for (int rank = 0; rank < n; ++rank) {
      const Status& s = results[static_cast<std::size_t>(rank)];
      if (!s && (s.error().code() != ErrorCode::kPeer) == by_itself) return rank;
    }
    return -1;
  };
  const int rank = failed(true) >= 0 ? failed(true) : failed(false);
  if (failed_rank) *failed_rank = rank;
  return rank < 0 ? Status() : std::move(results[static_cast<std::size_t>(rank)]);
}

}  // namespace reshard
