// A fake libcufile that treats ordinary memory as device memory. Tests inspect its state and inject failures. The
// library is tests/lib/device/fake_libcufile.cc; tests open it by path, as the program opens the real library by name.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace reshard {

struct FakeCuFile {
  int open_code = 0, register_code = 0;  // what these calls return; 0: success
  // The result of a read; 0: the number of bytes read. -1 comes with `read_errno`.
  std::int64_t read_result = 0;
  int read_errno = 0;
  std::atomic<int> interruptions = 0;       // number of coming reads that return -1 with EINTR
  std::size_t most = std::size_t{1} << 40;  // the most bytes that a call reads

  std::atomic<int> register_calls = 0;
  std::atomic<int> registered = 0;  // registered files
  std::atomic<int> read_calls = 0;
  std::atomic<std::int64_t> bytes_read = 0;
};

// Resets the state of the library at RESHARD_FAKE_CUFILE, which the process shares, and returns it.
FakeCuFile& fresh_fake_cufile();

}  // namespace reshard
