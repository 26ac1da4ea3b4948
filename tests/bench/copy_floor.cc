// The floor: the time that two threads take to copy the same bytes with plain pread and pwrite, without processing
// them.
//
//   copy_floor OUTPUT THREADS SOURCE...    all sources one after the other into one new file of their total length
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  constexpr off_t kBlock = 1 << 20;
  struct Block {
    int fd;
    off_t from, to, length;
  };
  std::vector<Block> blocks;
  off_t total = 0;
  for (int i = 3; i < argc; ++i) {
    const int fd = ::open(argv[i], O_RDONLY);
    struct stat st {};
    if (fd < 0 || ::fstat(fd, &st) != 0) return 5;
    for (off_t at = 0; at < st.st_size; at += kBlock)
      blocks.push_back({fd, at, total + at, std::min<off_t>(kBlock, st.st_size - at)});
    total += st.st_size;
  }
  const int out = ::open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0666);
  if (out < 0 || ::fallocate(out, 0, 0, total) != 0) return 5;
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&] {
    std::vector<char> buffer(kBlock);
    for (std::size_t i; (i = next++) < blocks.size() && !failed;) {
      const Block& b = blocks[i];
      const auto n = static_cast<std::size_t>(b.length);
      if (::pread(b.fd, buffer.data(), n, b.from) != b.length || ::pwrite(out, buffer.data(), n, b.to) != b.length)
        failed = true;
    }
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < std::atoi(argv[2]); ++t) pool.emplace_back(work);
  work();
  for (std::thread& t : pool) t.join();
  if (failed || ::close(out) != 0) return 5;
  return 0;
}
