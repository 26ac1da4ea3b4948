// A fake libcufile that reads into ordinary memory, counts calls, and fails as tests/support/fake_cufile.h describes.
// Built with WITHOUT_READ, it lacks a function.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "lib/device/cuda/cufile_api.h"
#include "tests/support/fake_cufile.h"

namespace reshard {
namespace {

// A handle is a descriptor plus one. The file is opened without O_DIRECT, so its rules do not apply.
cufile::Handle handle_of(int fd) { return reinterpret_cast<cufile::Handle>(static_cast<std::intptr_t>(fd) + 1); }
int descriptor_of(cufile::Handle handle) { return static_cast<int>(reinterpret_cast<std::intptr_t>(handle) - 1); }

}  // namespace

extern "C" {

FakeCuFile fake_cufile;

cufile::Error cuFileDriverOpen() { return {fake_cufile.open_code, 0}; }

cufile::Error cuFileHandleRegister(cufile::Handle* out, cufile::Descriptor* file) {
  ++fake_cufile.register_calls;
  if (fake_cufile.register_code != 0) return {fake_cufile.register_code, 0};
  const int fd = ::open(("/proc/self/fd/" + std::to_string(file->handle.fd)).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {5022, 0};
  ++fake_cufile.registered;
  *out = handle_of(fd);
  return {};
}

void cuFileHandleDeregister(cufile::Handle handle) {
  ::close(descriptor_of(handle));
  --fake_cufile.registered;
}

#ifndef WITHOUT_READ
ssize_t cuFileRead(cufile::Handle handle, void* buffer, size_t size, off_t file_offset, off_t buffer_offset) {
  ++fake_cufile.read_calls;
  if (fake_cufile.interruptions > 0) {
    --fake_cufile.interruptions;
    errno = EINTR;
    return -1;
  }
  if (fake_cufile.read_result != 0) {
    errno = fake_cufile.read_errno;
    return fake_cufile.read_result;
  }
  char* to = static_cast<char*>(buffer) + buffer_offset;
  const ssize_t n = ::pread(descriptor_of(handle), to, std::min(size, fake_cufile.most), file_offset);
  if (n > 0) fake_cufile.bytes_read += n;
  return n;
}
#endif

}  // extern "C"

}  // namespace reshard
