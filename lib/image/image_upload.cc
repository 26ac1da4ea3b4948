// SPDX-License-Identifier: Apache-2.0
#include "lib/image/image_upload.h"

#include <algorithm>
#include <numeric>

namespace reshard {
namespace {

Upload::Turn turn_of(Image::Needs needs) {
  switch (needs) {
    case Image::Needs::kNothing:
      return Upload::Turn::kAnyTime;
    case Image::Needs::kChecksums:
      return Upload::Turn::kAfterItsFile;
    case Image::Needs::kProofs:
      break;
  }
  return Upload::Turn::kLast;
}

}  // namespace

ImageFiles files_to_upload(const Image& image, const Target& target) {
  ImageFiles out;
  const bool is_file = target.single_file() != nullptr;
  const auto of_target = target.catalog().files.size();
  const auto order = [&](std::uint32_t file) { return file >= of_target ? 1 : image.holds_tensors(file) ? 0 : 2; };
  out.numbers.resize(image.files().size());
  std::iota(out.numbers.begin(), out.numbers.end(), 0u);
  std::stable_sort(out.numbers.begin(), out.numbers.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return order(a) < order(b); });
  for (const std::uint32_t number : out.numbers) {
    const Image::FileEntry& file = image.files()[number];
    out.files.push_back({is_file ? "" : file.path, file.size, image.holds_tensors(number)});
  }
  return out;
}

Upload::Source source_of(Image& image, const ImageFiles& files) {
  const std::vector<std::uint32_t>& numbers = files.numbers;
  Upload::Source out;
  out.read = [&image, numbers](std::uint32_t file, Index offset, MutableBytes bytes) {
    return image.read(numbers[file], offset, bytes);
  };
  out.turn = [&image, numbers](std::uint32_t file, Index offset, Index length) {
    return turn_of(image.needs(numbers[file], offset, length));
  };
  out.expect = [&image, numbers](std::uint32_t file, Index offset, Index length, std::vector<FileRange>& ranges) {
    image.add_ranges(numbers[file], offset, length, ranges);
  };
  return out;
}

void prove_share(Image& image, const ImageFiles& files, const Upload& upload) {
  std::vector<std::uint32_t> uploaded(files.numbers.size());
  for (std::uint32_t i = 0; i < files.numbers.size(); ++i) uploaded[files.numbers[i]] = i;
  image.prove([&](std::uint32_t file, Index offset) { return upload.is_mine(uploaded[file], offset); });
}

}  // namespace reshard
