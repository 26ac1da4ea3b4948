// SPDX-License-Identifier: Apache-2.0
// Serves the files of an image as a read-only file system through libfuse 3, which is loaded at run time.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/convert/converted_image.h"

namespace reshard::tools {

struct FuseOptions {
  std::string directory;  // mount point, an empty directory
  int threads = 4;        // that answer requests
  // Called with the files once the mount can be read.
  std::function<void(const std::vector<Image::FileEntry>& files)> ready;
  std::function<void(Index bytes)> progress;            // twice a second: bytes read through it so far
  std::function<void(const std::string& line)> failed;  // why a read failed with EIO; called from several threads
};

// Returns the version of the libfuse that is found, "3.14.0", or why there is none.
Result<std::string> fuse_version();

// Mounts the listed files, makes the image, serves it until it is unmounted or the program is interrupted, and
// unmounts. Opening a file waits until the image exists. If there is no listing, or the image has other files, it is
// mounted (again) when it exists. Fails as unsupported if FUSE is missing, and says what is needed.
using MakeImage = std::function<Result<std::unique_ptr<ConvertedImage>>()>;
using Listing = std::optional<ConvertedImage::Listing>;
Status serve_image(const Listing& listing, const MakeImage& make, const FuseOptions& options);

}  // namespace reshard::tools
