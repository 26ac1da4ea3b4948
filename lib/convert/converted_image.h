// SPDX-License-Identifier: Apache-2.0
// The output of a conversion that is read without being written: every file that convert would write, with the same
// bytes (lib/image/image.h).
//
// The digests of the manifest require all tensors to be read, so they are computed when the manifest is first read:
// that takes a pass over the source.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/convert/conversion.h"
#include "lib/convert/conversion_source.h"
#include "lib/convert/delta_chain.h"
#include "lib/convert/source_manifest.h"
#include "lib/image/image.h"
#include "lib/source/watched_files.h"

namespace reshard {

class ConvertedImage {
 public:
  // Names and sizes of the files, and the newest modification time of the files that they are computed from.
  struct Listing {
    std::vector<Image::FileEntry> files;
    Index newest_ns = 0;
    friend bool operator==(const Listing&, const Listing&) = default;
  };
  // Lists the image of a conversion, which may have been prepared from metadata alone.
  static Result<Listing> list(Conversion& conversion);

  // Opens the image of `conversion`, which must outlive it and is not run. With `check`, items with a recorded checksum
  // are read completely and verified before any byte of them is returned. Fails (unsupported) for formats that refer to
  // tensors in place, and for formats that compress.
  static Result<std::unique_ptr<ConvertedImage>> open(Conversion& conversion, bool check);

  // Opens the image for an upload, which reads all of it about once: the manifest is then made of the digests of what
  // was read. `reserved` bytes of the run's memory are left to the caller, who must call image().prove() before
  // anything is read.
  static Result<std::unique_ptr<ConvertedImage>> open_to_prove(Conversion& conversion, Index reserved);
  // Reads what was not read of the tensors, and checks what can be checked then: recorded checksums and digests, and
  // that the source has not changed. Must be called after open_to_prove(), by all ranks, before texts with digests are
  // read.
  Status prove();
  Conversion::Outcome outcome() const { return outcome_; }  // after prove()

  Image& image() { return *image_; }
  // Returns how many bytes at the start of a file are known although the rest is computed from all tensors: those of
  // the manifest before its digests. 0: the rest is not more expensive. A read that ends there is cheap.
  Index cheap_start(std::uint32_t file) const { return manifest_file_ == file ? manifest_head_ : 0; }
  // Fails (I/O), naming the file, if a file that the output is computed from has changed. Thread-safe.
  Status unchanged() const;
  Listing listing() const;

 private:
  struct FileBeside {
    Image::FileEntry entry;
    std::function<Result<std::string>()> make;
    std::string head = {};  // the start of what make() returns, if that is known without it
  };
  ConvertedImage(Conversion& conversion, bool check);
  static Result<std::unique_ptr<ConvertedImage>> open(Conversion& conversion, bool check,
                                                      std::optional<Index> reserved);
  Status add_files_inside();
  Result<std::vector<FileBeside>> files_beside();
  Index newest_ns() const;
  Result<Extent> find_sealed(std::string_view text) const;
  Result<std::string> manifest_text();
  Result<std::string> text_of_a_pass();

  Conversion& conversion_;
  WatchedFiles data_, others_;  // the files of the source's view, by their numbers; whatever else is read
  ConversionSource origin_;
  std::optional<SourceManifest> recorded_;
  std::optional<Extent> manifest_inside_;  // of an output that is a file
  std::optional<std::uint32_t> manifest_file_;
  Index manifest_head_ = 0;  // bytes
  bool proves_ = false;
  std::mutex proving_;
  std::optional<std::vector<TensorProof>> proofs_;  // after prove()
  std::optional<std::string> text_;                 // of the manifest, if a pass was needed for it
  Conversion::Outcome outcome_;
  std::unique_ptr<DeltaChain> deltas_;
  Index digest_room_ = 0;  // memory for a pass over the source, bytes
  std::unique_ptr<Image> image_;
};

}  // namespace reshard
