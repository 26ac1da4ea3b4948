// SPDX-License-Identifier: Apache-2.0
// Reads files directly into GPU memory, without a copy in host memory, if the machine has NVIDIA's cuFile (GPUDirect
// Storage). It is optional: if the library is missing, or cannot read a file or file system, the caller reads into host
// memory and uploads.
//
// The library is opened at run time. So this code is also compiled without CUDA, and tested with a library that reads
// into ordinary memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/recent_files.h"
#include "lib/base/result.h"
#include "lib/device/cuda/cufile_api.h"

namespace reshard {

// The library's name, and the files that must exist before it is opened. One belongs to its kernel driver: without that
// driver, cuFile reads through host memory and is of no use. The other is udev's, which it uses to find drives: on
// machines without it (containers), opening cuFile's driver has been seen to hang.
inline constexpr const char* kCuFileLibrary = "libcufile.so.0";
inline const std::vector<std::string> kCuFileNeeds = {"/proc/driver/nvidia-fs/devcount", "/run/udev"};

// Opens the library (a name for dlopen()) and its driver if all of `needs` exist; neither is closed again. The error
// says why cuFile cannot be used.
Result<cufile::Functions> load_cufile(const std::string& library, const std::vector<std::string>& needs);

// Reads files through cuFile. Thread-safe.
class CuFileReader {
 public:
  static constexpr std::size_t kMaxFiles = RecentFiles<File>::kMost;  // files kept open and registered

  explicit CuFileReader(const cufile::Functions& functions) : cufile_(functions) {}

  // Fills all of `to`, memory of this thread's current device, from `offset` of the file, before it returns. Returns
  // false if cuFile cannot read this file or into this memory; the file is not tried again, and the contents of `to`
  // are undefined. An end of file before `to` is full is a corrupt error.
  Result<bool> read(const std::shared_ptr<const File>& file, Index offset, MutableBytes to);

 private:
  class Registration;
  std::shared_ptr<const Registration> registered(const File& file) const;

  cufile::Functions cufile_;
  RecentFiles<Registration> registrations_;  // evicted files are registered again when they are read again
};

}  // namespace reshard
