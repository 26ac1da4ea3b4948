// SPDX-License-Identifier: Apache-2.0
// The interface for reading tensor data: a source can fill any box of any tensor of its catalog.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/storage/read_ahead.h"
#include "lib/base/storage/url.h"
#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/fragment_index.h"
#include "lib/device/codec.h"
#include "lib/device/device.h"
#include "lib/source/crc_ledger.h"
#include "lib/source/direct_reader.h"
#include "lib/source/pieces.h"
#include "lib/source/short_reads.h"
#include "lib/transport/transport.h"

namespace reshard {

// The position of a piece of a box within bytes kept in their stored layout.
struct LaidPiece {
  Box box;       // global coordinates
  Dims strides;  // elements
  Index at = 0;  // byte offset of its first element
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;

  virtual const Catalog& catalog() const = 0;

  // Fills `out` with the row-major elements of `box`, in the tensor's dtype, little-endian. `scratch` is the caller's
  // memory, one per thread. Thread-safe.
  Status read(std::size_t tensor, const Box& box, MutableBytes out, MutableBytes scratch) {
    return read_pieces(tensor, box, nullptr, out, scratch);
  }

  // Like read(), but into memory of the stream's device, without a copy in host memory, and synchronously. Returns
  // false if that is not possible; the contents of `out` are then undefined, and read() must be used. No queued work of
  // the stream may use `out`. Thread-safe if each thread has its own stream.
  virtual Result<bool> read_to_device(std::size_t /*tensor*/, const Box&, Stream&, MutableBytes /*out*/) {
    return false;
  }

  // Fills `out`, page-aligned host memory, with the stored bytes of the `wanted` pieces (null: all) of `box`, so that a
  // device can rearrange them, and adds their positions to `pieces`. Returns the number of bytes used, or 0 if that is
  // not possible, because elements are encoded or of another byte order, or because `out` is too small for the gaps
  // between them; then read_pieces() must be used. Thread-safe.
  virtual Result<Index> read_as_stored(std::size_t /*tensor*/, const Box&, const PieceFilter& /*wanted*/,
                                       MutableBytes /*out*/, std::vector<LaidPiece>& /*pieces*/) {
    return Index{0};
  }

  // Returns the stored pieces of `box`, in the same order on every call. Thread-safe.
  virtual std::vector<StoredPiece> pieces(std::size_t tensor, const Box& box) = 0;
  // Like read(), but fills only the elements of the `wanted` pieces (null: all).
  virtual Status read_pieces(std::size_t tensor, const Box& box, const PieceFilter& wanted, MutableBytes out,
                             MutableBytes scratch) = 0;

  // Runs the checks that need the whole data; call it after the last read. If several ranks have read, rank 0 checks
  // what none of them saw completely. `scratch` as in read().
  virtual Status finish(MutableBytes scratch, Transport* ranks) = 0;

  // For journals, before the first read. Checksums that earlier runs have seen (`seen`) count as seen now (on rank 0
  // only), and finish() checks all extents of `tensors`; both are empty if there was no earlier run. Afterwards
  // take_seen() returns what was seen since its last call.
  virtual void keep_seen(const std::vector<CrcPiece>& /*seen*/, const std::vector<std::size_t>& /*tensors*/) {}
  virtual std::vector<CrcPiece> take_seen() { return {}; }

  // Announces, before the first read, that everything is read once and need not enter the page cache. From then on
  // `scratch` must be page-aligned and larger than 8 KiB.
  virtual void expect_once() {}

  // Returns whether files of the source are behind URLs.
  virtual bool is_remote() const { return false; }
  // Adds the ranges of those files that read() of `box` will ask for with `scratch` bytes of scratch memory, for
  // ReadAhead. Thread-safe.
  virtual void add_ranges(std::size_t /*tensor*/, const Box& /*box*/, Index /*scratch*/, std::vector<FileRange>&) {}

  // Returns into how many columns a tensor is cut (column_count()): narrow columns need larger slabs.
  virtual Index columns(std::size_t tensor) const = 0;
};

// Reads a checkpoint's files through its catalog: any sharding, strides and format. Verifies recorded CRCs on the way.
// Encoded fragments are read and decoded completely, even if only a part is needed; each thread keeps the last one.
class FileSource : public TensorSource {
 public:
  // The catalog's tensors must be located. Both arguments must outlive this object.
  FileSource(const Catalog& catalog, FilePool& files);

  const Catalog& catalog() const override { return catalog_; }
  // Works if the stream reads files and the stored box is contiguous, not encoded, and without a CRC, which would be
  // computed in host memory.
  Result<bool> read_to_device(std::size_t number, const Box& box, Stream& stream, MutableBytes out) override;
  // Bypasses the page cache for what is not cached.
  Result<Index> read_as_stored(std::size_t number, const Box& box, const PieceFilter& wanted, MutableBytes out,
                               std::vector<LaidPiece>& pieces) override;
  std::vector<StoredPiece> pieces(std::size_t number, const Box& box) override;
  Status read_pieces(std::size_t number, const Box& box, const PieceFilter& wanted, MutableBytes out,
                     MutableBytes scratch) override;
  Status finish(MutableBytes scratch, Transport* ranks) override;
  void keep_seen(const std::vector<CrcPiece>& seen, const std::vector<std::size_t>& tensors) override;
  std::vector<CrcPiece> take_seen() override { return crcs_.take_recent(); }
  void expect_once() override;
  bool is_remote() const override { return is_url(catalog_.root); }
  void add_ranges(std::size_t number, const Box& box, Index scratch, std::vector<FileRange>& out) override;
  Index columns(std::size_t tensor) const override;

  // Number of checksums verified, by all ranks on rank 0 of several. Call after finish().
  Index checksums_checked() const;

 private:
  // One thread's decoder, and the chunk it decoded last.
  struct Decoding {
    ChunkDecoder decoder;
    std::vector<std::byte> stored;
    Extent extent;
    Bytes elements;  // empty: no chunk yet
  };
  std::unique_ptr<Decoding> take_decoding(const Extent& preferred);
  void give_back(std::unique_ptr<Decoding> decoding);
  Status decode(const Tensor& tensor, const Fragment& fragment, const File& file, Decoding& decoding);
  Status read_encoded(const Tensor& tensor, const PieceGroup& group, const Fragment& fragment, const File& file,
                      const Box& box, MutableBytes out);
  Status read_group(const Tensor& tensor, const Fragment& fragment, const PieceGroup& group,
                    const std::shared_ptr<const File>& file, MutableBytes bytes, MutableBytes scratch);
  bool is_past_cache(const Tensor& tensor, const PieceGroup& group, const File& file);
  Status check_crc(const Tensor& tensor, const Fragment& fragment, std::uint32_t got) const;
  Status add_crc(const Tensor& tensor, const Fragment& fragment, const PieceGroup& group, Bytes bytes);
  const FragmentIndex& index(std::size_t tensor);
  using ByPlace = std::map<std::pair<std::uint32_t, Index>, std::optional<std::uint32_t>>;  // CRCs by file and offset
  Result<ByPlace> bring_together(Transport* ranks);
  Result<std::uint32_t> crc_of(const Extent& extent, MutableBytes scratch);

  const Catalog& catalog_;
  FilePool& files_;
  DirectReader direct_;
  bool in_order_ = false;  // everything is read about once, in the order of the tensors
  bool once_ = false;      // as in_order_, and bypassing the page cache
  ShortReads short_;
  CrcLedger crcs_;
  ByPlace seen_before_;                 // CRCs of extents that earlier runs have seen completely
  std::vector<std::size_t> continued_;  // tensors that earlier runs have partly read
  SharedIndexes shared_indexes_;
  std::vector<const FragmentIndex*> indexes_;  // created on first use
  std::mutex index_mutex_;
  std::atomic<Index> checked_{0};
  std::vector<std::unique_ptr<Decoding>> idle_;  // at most one per thread
  std::mutex idle_mutex_;
};

// Returns the memory in bytes that each thread takes to decode the catalog's largest chunk, in addition to its slab and
// scratch memory.
Index decoding_memory(const Catalog& catalog);

// Returns into how many columns a tensor is cut: the number of distinct origins that its fragments have in the
// dimensions after the first, at least 1 and at most 64.
Index column_count(const FragmentList& fragments);

// Returns the error of a fragment whose bytes have the CRC-32 `got` instead of the recorded one.
Error crc_mismatch(const Catalog& catalog, const Tensor& tensor, const Fragment& fragment, std::uint32_t got);

}  // namespace reshard
