// Measures how long reading files takes in one of several ways, alone or copied into one new file that bypasses the
// page cache. The bytes are not processed.
//
//     cold_reads cached|direct|uring THREADS OUTPUT|- SOURCE...
//
// cached: pread. direct: pread with O_DIRECT. uring: O_DIRECT through an io_uring per thread, with eight reads in
// flight. Blocks have 1 MiB; an incomplete page at the end of a file is left out.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr off_t kBlock = 1 << 20, kPage = 4096;
constexpr unsigned kDepth = 8;

struct Block {
  int fd;
  off_t from, to, length;
};

class Ring {
 public:
  bool open() {
    io_uring_params p{};
    fd_ = static_cast<int>(::syscall(__NR_io_uring_setup, kDepth, &p));
    if (fd_ < 0) return false;
    const std::size_t sq = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    const std::size_t cq = p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe);
    char* const s = map(sq, IORING_OFF_SQ_RING);
    char* const c = map(cq, IORING_OFF_CQ_RING);
    char* const e = map(p.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    if (!s || !c || !e) return false;
    sq_tail_ = at(s, p.sq_off.tail), sq_mask_ = *at(s, p.sq_off.ring_mask), sq_array_ = at(s, p.sq_off.array);
    cq_head_ = at(c, p.cq_off.head), cq_tail_ = at(c, p.cq_off.tail), cq_mask_ = *at(c, p.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(c + p.cq_off.cqes);
    sqes_ = reinterpret_cast<io_uring_sqe*>(e);
    return true;
  }
  bool start(const Block& b, char* buffer, unsigned slot) {
    const unsigned tail = *sq_tail_, i = tail & sq_mask_;
    io_uring_sqe& e = sqes_[i];
    std::memset(&e, 0, sizeof e);
    e.opcode = IORING_OP_READ;
    e.fd = b.fd;
    e.addr = reinterpret_cast<std::uint64_t>(buffer);
    e.len = static_cast<unsigned>(b.length);
    e.off = static_cast<std::uint64_t>(b.from);
    e.user_data = slot;
    sq_array_[i] = i;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    return ::syscall(__NR_io_uring_enter, fd_, 1, 0, 0, nullptr, 0) == 1;
  }
  // Returns the slot of a finished read and its result.
  std::pair<unsigned, int> wait() {
    while (*cq_head_ == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE))
      if (::syscall(__NR_io_uring_enter, fd_, 0, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0) return {0, -1};
    const io_uring_cqe& c = cqes_[*cq_head_ & cq_mask_];
    const std::pair<unsigned, int> out(static_cast<unsigned>(c.user_data), c.res);
    __atomic_store_n(cq_head_, *cq_head_ + 1, __ATOMIC_RELEASE);
    return out;
  }

 private:
  char* map(std::size_t size, std::uint64_t what) const {
    void* const p =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(what));
    return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
  }
  static unsigned* at(char* base, unsigned offset) { return reinterpret_cast<unsigned*>(base + offset); }
  int fd_ = -1;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
};

struct Work {
  std::vector<Block> blocks;
  int out = -1;
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};

  bool write(const Block& b, const char* buffer) const {
    return out < 0 || ::pwrite(out, buffer, static_cast<std::size_t>(b.length), b.to) == b.length;
  }
  void one_by_one() {
    char* const buffer = static_cast<char*>(std::aligned_alloc(kPage, kBlock));
    for (std::size_t i; (i = next++) < blocks.size() && !failed;) {
      const Block& b = blocks[i];
      if (::pread(b.fd, buffer, static_cast<std::size_t>(b.length), b.from) != b.length || !write(b, buffer))
        failed = true;
    }
    std::free(buffer);
  }
  void many_at_once() {
    Ring ring;
    if (!ring.open()) {
      failed = true;
      return;
    }
    char* const buffers = static_cast<char*>(std::aligned_alloc(kPage, kDepth * kBlock));
    std::size_t block_of[kDepth];
    unsigned under_way = 0;
    const auto start = [&](unsigned slot) {
      const std::size_t i = next++;
      if (i >= blocks.size() || failed) return;
      block_of[slot] = i;
      if (ring.start(blocks[i], buffers + slot * kBlock, slot))
        ++under_way;
      else
        failed = true;
    };
    for (unsigned slot = 0; slot < kDepth; ++slot) start(slot);
    while (under_way > 0) {
      const auto [slot, n] = ring.wait();
      --under_way;
      const Block& b = blocks[block_of[slot]];
      if (n != b.length || !write(b, buffers + slot * kBlock)) failed = true;
      start(slot);
    }
    std::free(buffers);
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const std::string_view way = argv[1];
  const bool is_direct = way != "cached";
  Work work;
  off_t total = 0;
  for (int i = 4; i < argc; ++i) {
    const int fd = ::open(argv[i], O_RDONLY | (is_direct ? O_DIRECT : 0));
    struct stat st {};
    if (fd < 0 || ::fstat(fd, &st) != 0) return 5;
    const off_t size = st.st_size / kPage * kPage;
    for (off_t at = 0; at < size; at += kBlock)
      work.blocks.push_back({fd, at, total + at, std::min(kBlock, size - at)});
    total += size;
  }
  if (std::string_view(argv[3]) != "-") {
    work.out = ::open(argv[3], O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0666);
    if (work.out < 0 || ::fallocate(work.out, 0, 0, total) != 0) return 5;
  }
  std::vector<std::thread> pool;
  for (int t = 0; t < std::atoi(argv[2]); ++t)
    pool.emplace_back([&] { way == "uring" ? work.many_at_once() : work.one_by_one(); });
  for (std::thread& t : pool) t.join();
  if (work.failed || (work.out >= 0 && ::fdatasync(work.out) != 0)) return 5;
  return 0;
}
