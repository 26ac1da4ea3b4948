// SPDX-License-Identifier: Apache-2.0
// A checkpoint whose tensors are read when they are asked for: any part of them, by any number of threads.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "formats/registry.h"
#include "lib/infer/mesh_inference.h"
#include "lib/model/parts.h"
#include "lib/source/tensor_source.h"
#include "tools/commands.h"
#include "tools/job_options.h"

namespace reshard::python {

// Every `step`-th index of a dimension from `start` on, `count` of them.
struct Range {
  Index start = 0;
  Index count = 0;
  Index step = 1;  // at least 1
};

// A stored piece of a tensor: a box of it in a run of bytes.
struct PlacedPiece {
  std::string file;  // relative to the checkpoint
  Index offset = 0;  // bytes
  Index length = 0;  // bytes
  Box box;
  bool is_copy = false;
};

// What a read counts, and what ends it.
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
  // The model under other names and in another order of rows, where it lies. `words` are options of `reshard convert`:
  // --names, --config, --family, --include, ... Finds the payloads of all tensors that take part.
  Result<std::shared_ptr<LazyCheckpoint>> view(const std::vector<std::string>& words) const;

  const Format& format() const { return *open_->format; }
  Reader& reader() const { return *open_->reader; }
  const Catalog& catalog() const { return own_ ? *own_ : open_->reader->catalog(); }
  bool shows(std::size_t tensor) const { return own_ || is_of_part(catalog().tensors()[tensor].key(), part_); }
  const InferredMesh& mesh();  // worked out on the first call

  // Of a tensor (its index in catalog()). Reads the headers around its payloads the first time.
  Result<std::vector<PlacedPiece>> pieces(std::size_t tensor);

  // Fills `out` with the elements that the ranges say, one for each dimension, row-major and little-endian. Recorded
  // checksums of what is read as a whole are checked. Thread-safe.
  Status read(std::size_t tensor, const std::vector<Range>& ranges, std::byte* out, Watch& watch);

 private:
  // What a thread that reads works in. Kept for the next read: memory that is touched for the first time costs as much
  // as what is read into it.
  struct Room {
    std::vector<std::byte> scratch, box;
  };

  LazyCheckpoint(std::string path, std::vector<std::string> words, tools::Environment environment)
      : path_(std::move(path)), words_(std::move(words)), environment_(std::move(environment)) {}
  Status locate(std::size_t tensor);
  std::vector<Room> take_rooms(std::size_t count);
  void give_back(std::vector<Room> rooms);

  std::string path_;                // it was opened with
  std::vector<std::string> words_;  // likewise
  tools::Environment environment_;  // likewise
  std::string spool_;               // where what has to be decoded may be kept
  std::unique_ptr<OpenCheckpoint> open_;
  std::optional<Catalog> own_;  // of a view, whose tensors are located
  std::string part_;
  std::unique_ptr<FileSource> source_;
  std::mutex mutex_;  // of what follows
  std::vector<bool> is_located_;
  std::vector<Room> rooms_;  // that nobody works in; not more than one read takes
  std::optional<InferredMesh> mesh_;
};

// What `words`, options of `reshard convert`, say of a load or a view of the checkpoint at `path`, and how it is
// opened.
struct WantedOptions {
  ConversionOptions conversion;
  std::optional<LayoutDescriptor> source_layout;
  OpenOptions open;  // `layout` is for the caller to point there
};
Result<WantedOptions> wanted_options(const std::string& path, const std::vector<std::string>& words,
                                     const tools::Environment& environment);

}  // namespace reshard::python
