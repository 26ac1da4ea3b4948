// A read-only file system of the files of an image, through libfuse 3, which is opened at run time.
#pragma once

#include <functional>
#include <string>

#include "lib/convert/converted_image.h"

namespace reshard::tools {

struct FuseOptions {
  std::string directory;                                // where it is mounted; empty
  int threads = 4;                                      // that answer
  std::function<void()> ready;                          // called once it is mounted
  std::function<void(Index bytes)> progress;            // twice a second: bytes read through it so far
  std::function<void(const std::string& line)> failed;  // a read was answered with EIO, and why; from several threads
};

// Of the library that is found: "3.14.0".
Result<std::string> fuse_version();

// Mounts, answers until somebody unmounts it or the program is interrupted, and unmounts. An unsupported error where
// FUSE is not to be had says what is needed.
Status serve_image(ConvertedImage& files, const FuseOptions& options);

}  // namespace reshard::tools
