// Files read straight into a GPU's memory, with no copy in the host's, where the machine has NVIDIA's cuFile
// (GPUDirect Storage). Nothing needs it: a machine without the library, a file system or a file that it does not read
// are ordinary answers, and the caller reads into host memory and uploads.
//
// The library is opened at run time, so that this file is compiled, and tested against a library that reads into
// ordinary memory, where there is no CUDA.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/recent_files.h"
#include "lib/base/result.h"
#include "lib/device/cuda/cufile_api.h"

namespace reshard {

// The library's name, and the files without which it is not to be opened. One is its kernel driver's: without that it
// reads through host memory, as anybody can. The other is udev's, where it looks drives up. On machines that show less
// of themselves than it expects (containers), opening its driver has been seen to go on for ever.
inline constexpr const char* kCuFileLibrary = "libcufile.so.0";
inline const std::vector<std::string> kCuFileNeeds = {"/proc/driver/nvidia-fs/devcount", "/run/udev"};

// Opens the library (what dlopen() takes) and its driver, if there is all that it needs; neither is closed again. An
// error says why cuFile cannot be used.
Result<cufile::Functions> load_cufile(const std::string& library, const std::vector<std::string>& needs);

// Reads files through cuFile. Thread-safe.
class CuFileReader {
 public:
  static constexpr std::size_t kMaxFiles = RecentFiles<File>::kMost;  // that stay open and registered

  explicit CuFileReader(const cufile::Functions& functions) : cufile_(functions) {}

  // Fills all of `to`, memory of the device that is current in this thread, from `offset` of the file on, before it
  // returns. False where cuFile does not read this file or into this memory: it is not asked again for the file, and
  // `to` may hold anything. Errors are those of reading: an end of file before that is a corrupt one.
  Result<bool> read(const std::shared_ptr<const File>& file, Index offset, MutableBytes to);

 private:
  class Registration;
  std::shared_ptr<const Registration> registered(const File& file) const;

  cufile::Functions cufile_;
  RecentFiles<Registration> registrations_;  // files that are read again after others are registered anew
};

}  // namespace reshard
