// A conversion's output that is read and not written: every file that convert would make, with the same bytes
// (lib/image/image.h).
//
// The manifest's digests are known when all tensors have been read, so they are computed when the manifest is first
// asked for: a pass over the source.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/convert/conversion.h"
#include "lib/convert/conversion_source.h"
#include "lib/convert/source_manifest.h"
#include "lib/image/image.h"
#include "lib/source/watched_files.h"

namespace reshard {

class ConvertedImage {
 public:
  // What an image shows to who only looks: names and sizes, and the newest time of what it is made of.
  struct Listing {
    std::vector<Image::FileEntry> files;
    Index newest_ns = 0;
    friend bool operator==(const Listing&, const Listing&) = default;
  };
  // That of the image of a conversion, which may have been prepared from the metadata alone.
  static Result<Listing> list(Conversion& conversion);

  // Refers to the conversion, which is not run. With `check`, what has a checksum in the source is read whole and held
  // against it before anything of it is given out. Unsupported for formats that show tensors where they lie, and for
  // those that compress.
  static Result<std::unique_ptr<ConvertedImage>> open(Conversion& conversion, bool check);

  Image& image() { return *image_; }
  // An I/O error that names a file, once one of those that the output is made of is not what it was. Thread-safe.
  Status unchanged() const;
  Listing listing() const;

 private:
  struct FileBeside {
    Image::FileEntry entry;
    std::function<Result<std::string>()> make;
  };
  ConvertedImage(Conversion& conversion, bool check);
  Status add_files_inside();
  Result<std::vector<FileBeside>> files_beside() const;
  Index newest_ns() const;
  Result<Extent> find_sealed(std::string_view text) const;
  Result<std::string> manifest_text() const;

  Conversion& conversion_;
  WatchedFiles data_, others_;  // the files of the source's view, by their numbers; whatever else is read
  ConversionSource origin_;
  std::optional<SourceManifest> recorded_;
  std::optional<Extent> manifest_inside_;  // of an output that is a file
  Index digest_room_ = 0;                  // memory for a pass over the source, bytes
  std::unique_ptr<Image> image_;
};

}  // namespace reshard
