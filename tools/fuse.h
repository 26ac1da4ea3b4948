// A read-only file system of the files of an image, through libfuse 3, which is opened at run time.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/convert/converted_image.h"

namespace reshard::tools {

struct FuseOptions {
  std::string directory;  // where it is mounted; empty
  int threads = 4;        // that answer
  // Called once it is mounted and can be read, with its files.
  std::function<void(const std::vector<Image::FileEntry>& files)> ready;
  std::function<void(Index bytes)> progress;            // twice a second: bytes read through it so far
  std::function<void(const std::string& line)> failed;  // a read was answered with EIO, and why; from several threads
};

// Of the library that is found: "3.14.0".
Result<std::string> fuse_version();

// Mounts what is listed, makes the image, answers until somebody unmounts it or the program is interrupted, and
// unmounts. Who opens a file before there is an image waits for it. Where the image has other files than were listed it
// is mounted once more, and where nothing is listed when it is made. An unsupported error where FUSE is not to be had
// says what is needed.
using MakeImage = std::function<Result<std::unique_ptr<ConvertedImage>>()>;
using Listing = std::optional<ConvertedImage::Listing>;
Status serve_image(const Listing& listing, const MakeImage& make, const FuseOptions& options);

}  // namespace reshard::tools
