// SPDX-License-Identifier: Apache-2.0
// An image as the source of an upload (lib/output/upload.h).
#pragma once

#include <cstdint>
#include <vector>

#include "lib/image/image.h"
#include "lib/output/upload.h"

namespace reshard {

// The files of an image in the order in which they become visible: those with tensors, those next to them, the target's
// metadata.
struct ImageFiles {
  std::vector<UploadFile> files;
  std::vector<std::uint32_t> numbers;  // of each in the image
};
// `target` is the image's; a single-file output becomes the destination itself.
ImageFiles files_to_upload(const Image& image, const Target& target);

// `image` must outlive the result.
Upload::Source source_of(Image& image, const ImageFiles& files);

// Begins the proofs of an image that this rank uploads a share of (Image::prove).
void prove_share(Image& image, const ImageFiles& files, const Upload& upload);

}  // namespace reshard
