// SPDX-License-Identifier: Apache-2.0
// An open checkpoint for Python: reads any part of a tensor on request, from any number of threads.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "formats/registry.h"
#include "lib/infer/mesh_inference.h"
#include "lib/model/parts.h"
#include "lib/source/tensor_source.h"
#include "tools/commands.h"
#include "tools/job_options.h"

namespace reshard::python {

// A slice of a dimension: `count` indices from `start`, `step` apart.
struct Range {
  Index start = 0;
  Index count = 0;
  Index step = 1;  // at least 1
};

// A stored piece of a tensor: one of its boxes, in a byte range of a file.
struct PlacedPiece {
  std::string file;  // relative to the checkpoint
  Index offset = 0;  // bytes
  Index length = 0;  // bytes
  Box box;
  bool is_copy = false;
};

// The progress of a read, and a flag that interrupts it.
struct Watch {
  std::atomic<bool> interrupt{false};
  std::atomic<Index> done{0};   // bytes
  std::atomic<Index> total{0};  // bytes
};

class LazyCheckpoint {
 public:
  // Reads metadata. `words` are options of `reshard inspect`: --source-layout, --part, ...
  static Result<std::shared_ptr<LazyCheckpoint>> open(const std::string& path, const std::vector<std::string>& words,
                                                      const tools::Environment& environment);
  // Returns a view with other names and another row order, without copying. `words` are options of `reshard convert`:
  // --names, --config, --family, --include, ... Locates the payloads of all selected tensors.
  Result<std::shared_ptr<LazyCheckpoint>> view(const std::vector<std::string>& words) const;

  const Format& format() const { return *open_->format; }
  Reader& reader() const { return *open_->reader; }
  const Catalog& catalog() const { return own_ ? *own_ : open_->reader->catalog(); }
  bool shows(std::size_t tensor) const { return own_ || is_of_part(catalog().tensors()[tensor].key(), part_); }
  const InferredMesh& mesh();  // inferred on the first call

  // Returns the stored pieces of a tensor, given by its index in catalog(). The first call reads their headers.
  Result<std::vector<PlacedPiece>> pieces(std::size_t tensor);

  // Fills `out` with the selected elements, row-major and little-endian. `ranges` has one entry per dimension. Checks
  // the recorded checksums of items that are read completely. Thread-safe.
  Status read(std::size_t tensor, const std::vector<Range>& ranges, std::byte* out, Watch& watch);

 private:
  // The buffers of a reading thread. They are kept for the next read, because touching new memory takes as long as
  // reading into it.
  struct ReadBuffers {
    std::vector<std::byte> scratch, box;
  };

  LazyCheckpoint(std::string path, std::vector<std::string> words, tools::Environment environment)
      : path_(std::move(path)), words_(std::move(words)), environment_(std::move(environment)) {}
  Status locate(std::size_t tensor);
  std::vector<ReadBuffers> take_buffers(std::size_t count);
  void give_back(std::vector<ReadBuffers> rooms);

  std::string path_;                // as given to open()
  std::vector<std::string> words_;  // as given to open()
  tools::Environment environment_;  // as given to open()
  std::string spool_;               // directory for decoded data
  std::unique_ptr<OpenCheckpoint> open_;
  std::optional<Catalog> own_;  // a view's catalog, with located tensors
  std::string part_;
  std::unique_ptr<FileSource> source_;
  // Locating a tensor changes it and the list of files, in the reader's catalog. Locked exclusively by locate().
  std::shared_mutex catalog_mutex_;
  std::vector<bool> is_located_;      // guarded by catalog_mutex_
  std::mutex mutex_;                  // guards the members below
  std::vector<ReadBuffers> buffers_;  // unused buffers, at most as many as one read needs
  std::optional<InferredMesh> mesh_;
};

// The options of a load or a view.
struct WantedOptions {
  ConversionOptions conversion;
  std::optional<LayoutDescriptor> source_layout;
  OpenOptions open;  // the caller must point `layout` at source_layout
};
// Parses `words`, options of `reshard convert`, for the checkpoint at `path`.
Result<WantedOptions> wanted_options(const std::string& path, const std::vector<std::string>& words,
                                     const tools::Environment& environment);

}  // namespace reshard::python
