// A libcufile for which device memory is ordinary memory: what a test sees of it, and may spoil. The library is
// tests/lib/device/fake_libcufile.cc; tests open it by its path, as the program opens the real one by its name.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace reshard {

struct FakeCuFile {
  int open_code = 0, register_code = 0;  // what these calls return; 0: success
  // What reading returns; 0: what is read. -1 comes with `read_errno`.
  std::int64_t read_result = 0;
  int read_errno = 0;
  std::atomic<int> interruptions = 0;       // so many reads to come return -1 and EINTR
  std::size_t most = std::size_t{1} << 40;  // bytes that one call reads

  std::atomic<int> register_calls = 0;
  std::atomic<int> registered = 0;  // files at the moment
  std::atomic<int> read_calls = 0;
  std::atomic<std::int64_t> bytes_read = 0;
};

// The state of the library at RESHARD_FAKE_CUFILE, which is one for the process, as it was at first.
FakeCuFile& fresh_fake_cufile();

}  // namespace reshard
