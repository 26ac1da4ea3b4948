// SPDX-License-Identifier: Apache-2.0
#include "lib/device/cuda/cufile.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lib/base/find_function.h"
#include "lib/base/text.h"

namespace reshard {

Result<cufile::Functions> load_cufile(const std::string& library, const std::vector<std::string>& needs) {
  for (const std::string& path : needs)
    if (!TRY(path_exists(path))) return unsupported("cufile: not found: " + path);
  void* const opened = TRY(open_library({library.c_str()}, "cufile: cannot open " + library));
  const std::string what = "cufile: " + library;
  cufile::Functions out;
  TRY(find_function(opened, what, "cuFileDriverOpen", out.driver_open));
  TRY(find_function(opened, what, "cuFileHandleRegister", out.handle_register));
  TRY(find_function(opened, what, "cuFileHandleDeregister", out.handle_deregister));
  TRY(find_function(opened, what, "cuFileRead", out.read));
  const int code = out.driver_open().code;
  if (code != 0 && code != cufile::kAlreadyOpen)
    return unsupported("cufile: cannot open the driver: expected code 0, got " + std::to_string(code));
  return out;
}

// A file registered with cuFile. Has its own descriptor, which bypasses the page cache and is deregistered before it is
// closed.
class CuFileReader::Registration {
 public:
  Registration(const cufile::Functions& functions, File file, cufile::Handle handle)
      : cufile_(functions), file_(std::move(file)), handle_(handle) {}
  ~Registration() { cufile_.handle_deregister(handle_); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  cufile::Handle handle() const { return handle_; }

 private:
  const cufile::Functions& cufile_;
  File file_;
  cufile::Handle handle_;
};

Result<bool> CuFileReader::read(const std::shared_ptr<const File>& file, Index offset, MutableBytes to) {
  const auto registration = registrations_.get(file, [&](const File& f) { return registered(f); });
  if (!registration) return false;
  const auto size = std::ssize(to);
  for (Index done = 0; done < size;) {
    const ssize_t n = cufile_.read(registration->handle(), to.data(), size - done, offset + done, done);
    if (n == -1 && errno == EINTR) continue;
    // The mount, file or memory cannot be read that way; a failing drive gives EIO instead.
    const bool refused = n < -1 || (n == -1 && (errno == EINVAL || errno == EOPNOTSUPP));
    if (refused) {
      registrations_.refuse(*file);
      return false;
    }
    if (n == -1)
      return io_error(at(file->path(), offset + done) + ": cannot read with cuFile: " + std::strerror(errno));
    if (n == 0)
      return corrupt(at(file->path(), offset) + ": expected " + bytes_of(size) + ", got " + std::to_string(done) +
                     " before the end of the file");
    done += n;
  }
  return true;
}

std::shared_ptr<const CuFileReader::Registration> CuFileReader::registered(const File& file) const {
  Result<File> direct = file.reopen_direct();
  if (!direct) return nullptr;
  cufile::Descriptor descriptor;
  descriptor.handle.fd = direct->descriptor();
  cufile::Handle handle = nullptr;
  if (cufile_.handle_register(&handle, &descriptor).code != 0) return nullptr;
  return std::make_shared<const Registration>(cufile_, std::move(*direct), handle);
}

}  // namespace reshard
