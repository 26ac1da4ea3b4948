// SPDX-License-Identifier: Apache-2.0
// An output that is read without being written: any bytes of any of its files, in any order, computed from the source
// on demand. They are the bytes that a conversion with the same plan would write.
//
// Tensor data is divided into stretches, one extent of the target each, and these into slabs of about a megabyte. A
// slab is read from the source, converted, and cached. The bytes between stretches come from the target
// (Target::seal_at()); if they contain the checksum of a stretch, the stretch is read once to compute it.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/storage/read_ahead.h"
#include "lib/checkpoint/format.h"
#include "lib/engine/run_options.h"
#include "lib/engine/slabs.h"
#include "lib/engine/walk.h"
#include "lib/image/slab_cache.h"
#include "lib/plan/plan.h"
#include "lib/source/crc_ledger.h"
#include "lib/source/pieces.h"
#include "lib/source/tensor_source.h"
#include "lib/source/watched_files.h"

namespace reshard {

class Image {
 public:
  // What an image is made from. All of it must outlive the image.
  struct Inputs {
    const Plan& plan;
    TensorSource& source;
    const Target& target;
    const Catalog& target_view;   // the catalog that the plan's targets are in
    const WatchedFiles& watched;  // the source catalog's files, with the same numbers
  };
  // `run.memory` limits the whole process including the cache, and `reserved` bytes of it are left to others. A usage
  // error if that is too little. Fails like files_of().
  static Result<std::unique_ptr<Image>> create(const Inputs& of, const RunOptions& run, Index reserved = 0);

  struct FileEntry {
    std::string path;  // relative to the output
    Index size = 0;
    friend bool operator==(const FileEntry&, const FileEntry&) = default;
  };
  // Returns the target's files. Unsupported if the target encodes, because the lengths are then unknown before it is
  // written.
  static Result<std::vector<FileEntry>> files_of(const Target& target);
  // Returns the target's files, followed by those added.
  const std::vector<FileEntry>& files() const { return files_; }
  bool holds_tensors(std::uint32_t file) const { return file < stretches_.size() && !stretches_[file].empty(); }

  // Call these before the first read. add_file() adds a file. add_text() overrides a range with bytes that make()
  // returns, `place.length` of them, when they are first needed.
  std::uint32_t add_file(std::string path, Index size);
  void add_text(const Extent& place, std::function<Result<std::string>()> make);

  // Computes the digests of what is read, for proofs(). Call it before the first read. `counts` says whether the slab
  // that begins at this offset of a file counts: each slab of the output must count on one rank. Null: all count.
  void prove(const std::function<bool(std::uint32_t file, Index offset)>& counts = nullptr);

  // All functions below are thread-safe. Errors name the output's file and offset, and the problem in the source.

  // Bytes that are valid as long as this object.
  struct Part {
    Slab slab;
    Bytes bytes;
  };
  // Returns bytes [offset, offset + length) of a file in order, up to the end of the file.
  Result<std::vector<Part>> read(std::uint32_t file, Index offset, Index length);
  // Fills all of `out`, which must be inside the file.
  Status read(std::uint32_t file, Index offset, MutableBytes out);

  // Adds the ranges of files behind URLs that will be read for the slabs that begin in this range.
  void add_ranges(std::uint32_t file, Index offset, Index length, std::vector<FileRange>& out);

  // How much must be read before a range can be computed without reading anything twice.
  enum class Needs {
    kNothing,    // tensor data alone
    kChecksums,  // tensor data around it, whose checksums may be in the range
    kProofs,     // everything, because texts like the manifest are in the range
  };
  Needs needs(std::uint32_t file, Index offset, Index length) const;

  // Reads the slabs that count and were not read. Requires prove().
  Status read_rest();
  // Returns the proofs of the plan's tensors, of the slabs that count; nothing before each of them was read. Requires
  // prove().
  std::optional<std::vector<TensorProof>> proofs() const;
  // Returns whether a slab was computed more than once: because the cache had dropped it, or because it counts on
  // another rank. Requires prove().
  bool has_read_twice() const;
  // The checksums of what was read, and of what other ranks have read if their pieces are added.
  CrcLedger& crcs() { return crcs_; }

 private:
  // An extent of tensor data and the fragments in it.
  struct Stretch {
    Index offset = 0, length = 0;
    Index slab = 0;                    // size of its slabs, except the last
    Index first_slab = 0;              // number of the first among all slabs
    std::size_t first = 0, count = 0;  // of its entries in uses_
    Index end() const { return offset + length; }
  };
  struct FragmentUse {
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

  Image(const Inputs& of, const RunOptions& run) : of_(of), run_(run), crcs_(extents_of(of.target.catalog())) {}
  Status find_stretches();
  Status make_buffers(Index reserved);
  Index slab_of(std::size_t first, std::size_t end) const;
  const FragmentList& fragments_of(const FragmentUse& use) const;
  const Tensor& from(const FragmentUse& use) const {
    return of_.source.catalog().tensors()[of_.plan.tensors[use.planned].from];
  }
  const Tensor& to(const FragmentUse& use) const { return of_.target_view.tensors()[of_.plan.tensors[use.planned].to]; }
  const Stretch* stretch_after(std::uint32_t file, Index offset) const;
  Result<Slab> slab_at(std::uint32_t file, const Stretch& stretch, Index k);
  std::optional<Error> damaged(const SlabCache::Key& key);
  Result<Slab> fill(std::uint32_t file, const Stretch& stretch, Index begin, Index end);
  // Digests of pieces, by planned tensor.
  using Digests = std::vector<std::pair<std::uint32_t, TensorProof>>;
  Status fill_piece(const FragmentUse& use, const Piece& piece, Index begin, MutableBytes out, const Buffers& buffers,
                    Digests* digests);
  Status digest(const FragmentUse& use, const Box& box, const std::byte* before, const std::byte* after, Stream& stream,
                Digests& out) const;
  Result<Slab> around(const Extent& place);
  Status overlay(const Text& text, const Extent& place, MutableBytes out);
  Result<std::uint32_t> crc_of(const Extent& extent);

  Inputs of_;
  RunOptions run_;
  std::vector<FileEntry> files_;
  std::vector<std::vector<Stretch>> stretches_;  // of each of the target's files, in order
  std::vector<FragmentUse> uses_;
  std::vector<Text> texts_;
  CrcLedger crcs_;
  Index slab_bytes_ = 0;  // largest slab, in the source's or the target's dtype
  std::unique_ptr<ThreadBuffers> memory_;
  std::unique_ptr<SlabCache> cache_;

  struct Proving {
    std::mutex mutex;
    std::vector<TensorProof> proofs;
    std::vector<bool> seen;  // by number of the slab
    Index left = 0;          // slabs not seen
    bool read_twice = false;
  };
  std::unique_ptr<Proving> proving_;

  std::mutex damaged_mutex_;
  std::map<SlabCache::Key, Error> damaged_;  // slabs that failed permanently

  std::mutex idle_mutex_;
  std::condition_variable given_back_;
  std::vector<const Buffers*> idle_;
};

}  // namespace reshard
