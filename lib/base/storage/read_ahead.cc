// SPDX-License-Identifier: Apache-2.0
#include "lib/base/storage/read_ahead.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "lib/base/storage/http.h"
#include "lib/base/storage/storage.h"

namespace reshard {
namespace {

constexpr Index kMostAtOnce = Index{8} << 20;  // bytes per request
constexpr Index kNear = Index{64} << 10;       // bytes of a gap that is cheaper to fetch than another request

}  // namespace

// Memory that is returned to the system when it is freed. The allocator would keep it for each of 32 threads.
class FetchedPages {
 public:
  FetchedPages() = default;
  ~FetchedPages() {
    if (data_) ::munmap(data_, size_);
  }
  FetchedPages(const FetchedPages&) = delete;
  FetchedPages& operator=(const FetchedPages&) = delete;

  // Returns false if there is no memory. Called once.
  bool allocate(std::size_t size) {
    void* const made = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return false;
    data_ = static_cast<std::byte*>(made);
    size_ = size;
    return true;
  }
  MutableBytes bytes() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

struct ReadAhead::Fetch {
  enum class State { kWaiting, kRunning, kDone, kFailed };
  std::shared_ptr<const StoredFile> file;
  Index begin = 0, end = 0;
  Index left = 0;  // bytes that readers have not taken yet
  State state = State::kWaiting;
  FetchedPages pages;
};

// All fetches of the process and the threads that run them.
class Fetches {
 public:
  using Fetch = ReadAhead::Fetch;
  using State = Fetch::State;

  static Fetches& of_process() {
    static auto* const all = [] {
      std::atexit([] { of_process().end(); });
      return new Fetches();  // never destroyed, like its threads
    }();
    return *all;
  }

  void add(ReadAhead& owner, const std::shared_ptr<const StoredFile>& file, std::vector<FileRange> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
    const std::lock_guard lock(mutex_);
    OfFile& of_file = files_[file->identity()];
    for (std::size_t i = 0; i < ranges.size();) {
      const Index begin = ranges[i].offset;
      Index end = begin;
      for (; i < ranges.size() && ranges[i].offset <= end + kNear && ranges[i].offset - begin < kMostAtOnce; ++i)
        end = std::max(end, ranges[i].offset + ranges[i].length);
      add_missing(owner, of_file, file, begin, end);
    }
    for (const FileRange& range : ranges)
      for_each(of_file, range.offset, range.offset + range.length,
               [&](Fetch& fetch, Index begin, Index end) { fetch.left += end - begin; });
    start_threads();
    changed_.notify_all();
  }

  Index take(const StoredFile& file, Index offset, MutableBytes out) {
    std::unique_lock lock(mutex_);
    Index done = 0;
    while (done < std::ssize(out)) {
      const auto of_file = files_.find(file.identity());
      if (of_file == files_.end()) break;
      const std::shared_ptr<Fetch> fetch = find(of_file->second, offset + done);
      if (!fetch) break;
      if (fetch->state == State::kWaiting) run(*fetch, lock);  // a reader waits for it, so do not wait for a thread
      changed_.wait(lock, [&] { return fetch->state == State::kDone || fetch->state == State::kFailed; });
      if (fetch->state == State::kFailed) {
        erase(*fetch);
        break;
      }
      const Index n = std::min(std::ssize(out) - done, fetch->end - (offset + done));
      lock.unlock();
      std::memcpy(out.data() + done, fetch->pages.bytes().data() + (offset + done - fetch->begin), n);
      lock.lock();
      done += n;
      fetch->left -= n;
      if (fetch->left <= 0) erase(*fetch);
    }
    return done;
  }

  Index bytes() {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

  // Ends all fetches, so that no thread uses libcurl while exit() destroys what it needs. Not all have a reader that
  // waits for them.
  void end() {
    constexpr std::chrono::seconds kMost(5);
    end_http();
    std::unique_lock lock(mutex_);
    for (const auto& fetch : queue_) fetch->state = State::kFailed;
    queue_.clear();
    changed_.wait_for(lock, kMost, [&] { return busy_ == 0; });
  }

  void drop(ReadAhead& owner) {
    std::unique_lock lock(mutex_);
    for (const std::weak_ptr<Fetch>& own : owner.own_) {
      const std::shared_ptr<Fetch> fetch = own.lock();
      if (!fetch) continue;
      if (fetch->state == State::kWaiting) fetch->state = State::kFailed;
      changed_.wait(lock, [&] { return fetch->state != State::kRunning; });
      erase(*fetch);
    }
    std::erase_if(queue_, [](const auto& fetch) { return fetch->state != State::kWaiting; });
  }

 private:
  using OfFile = std::map<Index, std::shared_ptr<Fetch>>;  // by first byte; they do not overlap

  // Calls `each` for each part of [begin, end) that a fetch covers.
  template <class Each>
  static void for_each(OfFile& of_file, Index begin, Index end, Each each) {
    auto at = of_file.upper_bound(begin);
    if (at != of_file.begin()) --at;
    for (; at != of_file.end() && at->first < end; ++at)
      if (at->second->end > begin) each(*at->second, std::max(begin, at->first), std::min(end, at->second->end));
  }

  void add_missing(ReadAhead& owner, OfFile& of_file, const std::shared_ptr<const StoredFile>& file, Index begin,
                   Index end) {
    end = std::min(end, file->size());
    while (begin < end) {
      if (const auto there = find(of_file, begin)) {
        begin = there->end;
        continue;
      }
      const auto next = of_file.lower_bound(begin);
      Index stop = std::min(end, begin + kMostAtOnce);
      if (next != of_file.end()) stop = std::min(stop, next->first);
      auto fetch = std::make_shared<Fetch>();
      fetch->file = file;
      fetch->begin = begin;
      fetch->end = stop;
      of_file.emplace(begin, fetch);
      bytes_ += stop - begin;
      queue_.push_back(fetch);
      owner.own_.push_back(fetch);
      begin = stop;
    }
    std::erase_if(owner.own_, [](const auto& own) { return own.expired(); });
  }

  static std::shared_ptr<Fetch> find(const OfFile& of_file, Index offset) {
    auto at = of_file.upper_bound(offset);
    if (at == of_file.begin()) return nullptr;
    --at;
    return at->second->end > offset ? at->second : nullptr;
  }

  void erase(const Fetch& fetch) {
    const auto of_file = files_.find(fetch.file->identity());
    if (of_file == files_.end()) return;
    const auto at = of_file->second.find(fetch.begin);
    if (at != of_file->second.end() && at->second.get() == &fetch) {
      bytes_ -= fetch.end - fetch.begin;
      of_file->second.erase(at);
    }
    if (of_file->second.empty()) files_.erase(of_file);
  }

  static bool read(Fetch& fetch) {
    try {
      return fetch.pages.allocate(fetch.end - fetch.begin) &&
             fetch.file->read_stored(fetch.begin, fetch.pages.bytes()).has_value();
    } catch (const std::bad_alloc&) {  // the reader fetches it again, into its own memory
      return false;
    }
  }

  void run(Fetch& fetch, std::unique_lock<std::mutex>& lock) {
    fetch.state = State::kRunning;
    lock.unlock();
    const bool is_there = read(fetch);
    lock.lock();
    fetch.state = is_there ? State::kDone : State::kFailed;
    changed_.notify_all();
  }

  // Starts a thread for each waiting fetch, up to kMostRequests. If the system refuses, readers run the remaining
  // fetches themselves.
  void start_threads() {
    while (threads_ < kMostRequests && threads_ - busy_ < std::ssize(queue_)) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (const std::system_error&) {
        return;
      }
      ++threads_;
    }
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const std::shared_ptr<Fetch> fetch = queue_.front();
      queue_.pop_front();
      if (fetch->state != State::kWaiting) continue;
      ++busy_;
      run(*fetch, lock);
      --busy_;
      if (busy_ == 0) changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, OfFile> files_;  // by StoredFile::identity()
  std::deque<std::shared_ptr<Fetch>> queue_;
  Index bytes_ = 0;
  int threads_ = 0, busy_ = 0;
};

std::vector<FileRange> starts_of(const std::string& directory, const std::vector<std::string>& names) {
  constexpr Index kStart = Index{64} << 10;
  std::vector<FileRange> out;
  for (const std::string& name : names) out.push_back({path_join(directory, name), 0, kStart});
  return out;
}

ReadAhead::ReadAhead() = default;
ReadAhead::~ReadAhead() {
  if (!own_.empty()) Fetches::of_process().drop(*this);
}

void ReadAhead::fetch(const std::vector<FileRange>& ranges) {
  std::map<std::string, std::vector<FileRange>> by_file;
  for (const FileRange& range : ranges)
    if (range.length > 0 && is_url(range.path)) by_file[range.path].push_back(range);
  for (auto& [path, of_file] : by_file)
    if (const auto file = StoredFile::open(path)) Fetches::of_process().add(*this, *file, std::move(of_file));
}

void fetch_as_in_others(const std::vector<FileRange>& ranges, ReadAhead& ahead) {
  ahead.fetch(ranges);
  for (const FileRange& range : ranges)
    if (is_url(range.path))
      if (const auto file = StoredFile::open(range.path)) (*file)->expect_after(range.offset, range.length);
}

Index fetched_bytes() { return Fetches::of_process().bytes(); }

Index take_fetched(const StoredFile& file, Index offset, MutableBytes out) {
  return Fetches::of_process().take(file, offset, out);
}

}  // namespace reshard
