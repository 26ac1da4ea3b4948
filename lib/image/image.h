// An output that is read and not written: bytes [a, b) of any of its files, in any order, made of the source when they
// are asked for. They are those that copying by the same plan (run.h, output.h) would leave there.
//
// Tensor data lie in stretches, an extent of the target each, which are cut into slabs of about a megabyte. A slab is
// filled from the source, converted, and kept in the cache. What lies between the stretches is sealed by the target
// (Target::seal_at); where that takes the checksum of a stretch, it is read once for that.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/engine/run_options.h"
#include "lib/engine/slabs.h"
#include "lib/image/slab_cache.h"
#include "lib/plan/plan.h"
#include "lib/source/crc_ledger.h"
#include "lib/source/pieces.h"
#include "lib/source/tensor_source.h"
#include "lib/source/watched_files.h"

namespace reshard {

class Image {
 public:
  // What an image is of; it refers to all of them.
  struct Of {
    const Plan& plan;
    TensorSource& source;
    const Target& target;
    const Catalog& target_view;   // the one that the plan goes to
    const WatchedFiles& watched;  // the files of the source's catalog, by their numbers there
  };
  // `run.memory` bounds the process with the cache, `reserved` bytes of which are left to others. A usage error where
  // that is too little. Unsupported as files_of() is.
  static Result<std::unique_ptr<Image>> create(const Of& of, const RunOptions& run, Index reserved = 0);

  struct FileEntry {
    std::string path;  // relative to the output
    Index size = 0;
    friend bool operator==(const FileEntry&, const FileEntry&) = default;
  };
  // The target's. Unsupported for one that encodes: its lengths are not known before it is written.
  static Result<std::vector<FileEntry>> files_of(const Target& target);
  // The target's files, then those that were added.
  const std::vector<FileEntry>& files() const { return files_; }

  // Before the first read. A file of its own; and bytes that make() gives, `place.length` of them, when they are first
  // asked for: they stand for whatever else is there.
  std::uint32_t add_file(std::string path, Index size);
  void add_text(const Extent& place, std::function<Result<std::string>()> make);

  // The rest is thread-safe. Errors say the file of the output, the place there, and what went wrong in the source.

  // Bytes in memory that lives as long as this.
  struct Part {
    Slab slab;
    Bytes bytes;
  };
  // Bytes [offset, offset + length) of a file, in order, as far as the file goes.
  Result<std::vector<Part>> read(std::uint32_t file, Index offset, Index length);
  // Fills all of `out`, which lies inside the file.
  Status read(std::uint32_t file, Index offset, MutableBytes out);

 private:
  // An extent of tensor data, and the fragments that lie in it.
  struct Stretch {
    Index offset = 0, length = 0;
    Index slab = 0;                    // bytes that its slabs have, but for the last
    std::size_t first = 0, count = 0;  // of uses_
    Index end() const { return offset + length; }
  };
  struct Use {
    Extent extent;
    std::uint32_t planned = 0;
    std::uint32_t fragment = 0;
    bool replica = false;
  };
  struct Text {
    Extent place;
    std::function<Result<std::string>()> make;
  };
  class Lease;

  Image(const Of& of, const RunOptions& run) : of_(of), run_(run), crcs_(extents_of(of.target.catalog())) {}
  Status find_stretches();
  Status make_buffers(Index reserved);
  Index slab_of(std::size_t first, std::size_t end) const;
  const FragmentList& fragments_of(const Use& use) const;
  const Tensor& from(const Use& use) const {
    return of_.source.catalog().tensors()[of_.plan.tensors[use.planned].from];
  }
  const Tensor& to(const Use& use) const { return of_.target_view.tensors()[of_.plan.tensors[use.planned].to]; }
  const Stretch* stretch_after(std::uint32_t file, Index offset) const;
  Result<Slab> slab_at(std::uint32_t file, const Stretch& stretch, Index k);
  std::optional<Error> damaged(const SlabCache::Key& key);
  Result<Slab> fill(std::uint32_t file, const Stretch& stretch, Index begin, Index end);
  Status fill_piece(const Use& use, const Piece& piece, Index begin, MutableBytes out, const Buffers& buffers);
  Result<Slab> around(const Extent& place);
  Status overlay(const Text& text, const Extent& place, MutableBytes out);
  Result<std::uint32_t> crc_of(const Extent& extent);

  Of of_;
  RunOptions run_;
  std::vector<FileEntry> files_;
  std::vector<std::vector<Stretch>> stretches_;  // of each of the target's files, in order
  std::vector<Use> uses_;
  std::vector<Text> texts_;
  CrcLedger crcs_;
  Index slab_bytes_ = 0;  // at most, as read and as wanted
  std::unique_ptr<ThreadBuffers> memory_;
  std::unique_ptr<SlabCache> cache_;

  std::mutex damaged_mutex_;
  std::map<SlabCache::Key, Error> damaged_;  // slabs that were read and are wrong, for good

  std::mutex idle_mutex_;
  std::condition_variable given_back_;
  std::vector<const Buffers*> idle_;
};

}  // namespace reshard
