// Where tensor data come from: something that can fill any box of any tensor of a catalog.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lib/base/file.h"
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

// A piece of a box among bytes that lie as they are stored.
struct LaidPiece {
  Box box;       // global coordinates
  Dims strides;  // elements
  Index at = 0;  // bytes to its first element
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;

  virtual const Catalog& catalog() const = 0;

  // Fills `out` with the elements of `box`, row-major, in the tensor's dtype, little-endian. `scratch` is the caller's
  // memory, one per thread. Thread-safe.
  Status read(std::size_t tensor, const Box& box, MutableBytes out, MutableBytes scratch) {
    return read_pieces(tensor, box, nullptr, out, scratch);
  }

  // Fills `out`, memory of the stream's device, as read() would, without host memory in between and before it returns.
  // False where that is not possible; then `out` may hold anything, and read() is to be used. Nothing that the stream
  // has queued may use `out`. Thread-safe, as streams allow.
  virtual Result<bool> read_to_device(std::size_t /*tensor*/, const Box&, Stream&, MutableBytes /*out*/) {
    return false;
  }

  // Fills `out`, host memory from a page's first address on, with what holds the pieces `wanted` (null: all) of `box`,
  // as it is stored, for a device to put in place; says which lie where. Returns how many bytes of `out` are used: 0
  // where that is not possible, as elements are encoded or of another byte order, or `out` is too small for what lies
  // between them; then read_pieces() is to be used. Thread-safe.
  virtual Result<Index> read_as_stored(std::size_t /*tensor*/, const Box&, const PieceFilter& /*wanted*/,
                                       MutableBytes /*out*/, std::vector<LaidPiece>& /*pieces*/) {
    return Index{0};
  }

  // The pieces of `box` as they are stored, the same and in the same order whoever asks. Thread-safe.
  virtual std::vector<StoredPiece> pieces(std::size_t tensor, const Box& box) = 0;
  // As read(), but only those places of `out` that the pieces `wanted` (null: all) fill.
  virtual Status read_pieces(std::size_t tensor, const Box& box, const PieceFilter& wanted, MutableBytes out,
                             MutableBytes scratch) = 0;

  // After the last read: checks what could not be checked while reading. Of several ranks that have read, rank 0 checks
  // what none of them saw whole. `scratch` as above.
  virtual Status finish(MutableBytes scratch, Transport* ranks) = 0;

  // For a journal, before the first read. What earlier runs saw of checksums, `seen`, counts as if it was seen now (of
  // several ranks by rank 0), and finish() sees to all of those of `tensors`: none where there was no earlier run. Then
  // what was seen since take_seen() was last called.
  virtual void keep_seen(const std::vector<CrcPiece>& /*seen*/, const std::vector<std::size_t>& /*tensors*/) {}
  virtual std::vector<CrcPiece> take_seen() { return {}; }

  // Before the first read: what follows is read once, so that it need not come into the page cache. From then on
  // `scratch` is of more than 8 KiB that begin with a page.
  virtual void expect_once() {}

  // How many side-by-side columns of shards a tensor has: narrow pieces want larger slabs.
  virtual Index columns(std::size_t tensor) const = 0;
};

// Reads a checkpoint's files through their catalog: any cut, any strides, any format. Checks recorded CRCs on the way.
// Encoded fragments are read and decoded whole, whatever part of them is wanted; each thread keeps the last one.
class FileSource : public TensorSource {
 public:
  // The catalog's tensors must be located. Refers to both arguments.
  FileSource(const Catalog& catalog, FilePool& files);

  const Catalog& catalog() const override { return catalog_; }
  // Where the stream reads files and the box lies there as it is wanted: in unbroken runs, plain, and without a CRC,
  // which is computed on the way through host memory.
  Result<bool> read_to_device(std::size_t number, const Box& box, Stream& stream, MutableBytes out) override;
  // What is not in the page cache is read past it.
  Result<Index> read_as_stored(std::size_t number, const Box& box, const PieceFilter& wanted, MutableBytes out,
                               std::vector<LaidPiece>& pieces) override;
  std::vector<StoredPiece> pieces(std::size_t number, const Box& box) override;
  Status read_pieces(std::size_t number, const Box& box, const PieceFilter& wanted, MutableBytes out,
                     MutableBytes scratch) override;
  Status finish(MutableBytes scratch, Transport* ranks) override;
  void keep_seen(const std::vector<CrcPiece>& seen, const std::vector<std::size_t>& tensors) override;
  std::vector<CrcPiece> take_seen() override { return crcs_.take_recent(); }
  void expect_once() override;
  Index columns(std::size_t tensor) const override;

  // By all ranks, on rank 0 of several, after finish().
  Index checksums_checked() const;

 private:
  // What one thread decodes with, and the chunk it decoded last.
  struct Decoding {
    ChunkDecoder decoder;
    std::vector<std::byte> stored;
    Extent extent;
    Bytes elements;  // empty: none yet
  };
  std::unique_ptr<Decoding> take_decoding(const Extent& preferred);
  void give_back(std::unique_ptr<Decoding> decoding);
  Status decode(const Tensor& tensor, const Fragment& fragment, const File& file, Decoding& decoding);
  Status read_encoded(const Tensor& tensor, const PieceGroup& group, const Fragment& fragment, const File& file,
                      const Box& box, MutableBytes out);
  Status check_crc(const Tensor& tensor, const Fragment& fragment, std::uint32_t got) const;
  Status add_crc(const Tensor& tensor, const Fragment& fragment, const PieceGroup& group, Bytes bytes);
  const FragmentIndex& index(std::size_t tensor);
  using ByPlace = std::map<std::pair<std::uint32_t, Index>, std::optional<std::uint32_t>>;  // CRCs, by file and offset
  Result<ByPlace> bring_together(Transport* ranks);
  Result<std::uint32_t> crc_of(const Extent& extent, MutableBytes scratch);

  const Catalog& catalog_;
  FilePool& files_;
  DirectReader direct_;
  bool in_order_ = false;  // all is read about once, and in the order of the tensors
  bool once_ = false;      // likewise, and what is not cached past the page cache
  ShortReads short_;
  CrcLedger crcs_;
  ByPlace seen_before_;                 // CRCs that earlier runs have seen whole
  std::vector<std::size_t> continued_;  // tensors of which earlier runs have seen some
  SharedIndexes shared_indexes_;
  std::vector<const FragmentIndex*> indexes_;  // made on first use
  std::mutex index_mutex_;
  std::atomic<Index> checked_{0};
  std::vector<std::unique_ptr<Decoding>> idle_;  // as many as threads have decoded at once
  std::mutex idle_mutex_;
};

// Bytes that each thread takes to decode the catalog's largest chunk, beside its slab and scratch memory.
Index decoding_memory(const Catalog& catalog);

// The number of distinct cuts of a tensor in dimensions after the first.
Index column_count(const FragmentList& fragments);

}  // namespace reshard
