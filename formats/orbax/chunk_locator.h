// SPDX-License-Identifier: Apache-2.0
// Finds the bytes of the chunks of arrays: where each is stored, those inside shards, and those that can be read only
// after they are decoded.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "formats/orbax/zarr.h"
#include "lib/base/file.h"
#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"

namespace reshard::orbax {

// The stored form of an array.
struct StoredArray {
  ZarrArray array;
  bool stores_fill_values = false;
  std::optional<Extent> fill;                          // one element of the fill value
  std::shared_ptr<const ChunkEncoding> encoding = {};  // for chunks that are decoded in place

  bool is_fill(const Fragment& chunk) const { return fill && chunk.extent == *fill; }
};

// Returns the size of a decoded chunk.
Index chunk_bytes(const ZarrArray& array);

// Returns whether the chunks of a tensor are read where they are stored. Others are decoded once, into the spool.
bool is_read_in_place(const Tensor& tensor, const ZarrArray& array);

// Locates the chunks of one checkpoint. locate() uses several threads; the functions are not thread-safe.
class ChunkLocator {
 public:
  // `catalog` and `files` must outlive the locator.
  ChunkLocator(Catalog& catalog, FilePool& files) : catalog_(catalog), files_(files) {}

  // Returns a chunk or shard that is stored at `extent`, with its encoding if the tensor is located. Fails (corrupt) if
  // the chunk of a located tensor cannot have that length.
  Result<Fragment> stored_chunk(const Tensor& tensor, const StoredArray& stored, const Box& box, const Extent& extent);
  // Returns the fill value for a chunk that is not stored. Fails (corrupt) if the checkpoint stores fill values, so
  // that the chunk is lost.
  Result<Fragment> missing_chunk(const Tensor& tensor, const StoredArray& stored, const Box& box) const;

  // Keeps the stored form of a tensor until locate() needs it.
  void keep(const std::string& tensor, StoredArray stored) { stored_.emplace(tensor, std::move(stored)); }
  // Replaces the chunks and shards of tensors, whose stored forms were kept, by chunks that can be read. Decodes into
  // memory if `spool` is empty or much of what the process may take is left, else into a file without a name in the
  // directory `spool`.
  Status locate(const std::vector<Tensor*>& tensors, int threads, const std::string& spool);

 private:
  // The work on a stored chunk or shard: the chunks that replace it.
  struct Job {
    const Tensor* tensor = nullptr;
    const StoredArray* stored = nullptr;
    Fragment item = {};
    Index spool_at = 0;
    std::vector<Fragment> chunks = {};
  };

  // A file that chunks are decoded into.
  struct Spool {
    std::string_view name;  // in the catalog
    std::uint32_t file = 0;
    Index used = 0;
    std::shared_ptr<const File> open = {};
    std::vector<std::shared_ptr<const void>> pages = {};  // mapped, if the file is in memory
  };

  Result<Fragment> whole_chunk(const Tensor& tensor, const StoredArray& stored, const Box& box, const Extent& extent);
  Status make_room(const std::vector<Tensor*>& tensors, const std::string& spool);
  bool make_room_in_memory(Index bytes, bool must);
  Status make_room_on_disk(Index bytes, const std::string& directory);
  Status extend(Spool& spool, Index bytes, const std::function<Result<File>()>& create);
  Status locate_batch(std::vector<Job>& jobs, int threads);
  Status locate_item(Job& job);
  Status locate_in_shard(Job& job);
  Status decode_to_spool(const Job& job, Fragment& chunk, Index at);
  Result<Index> decode_frame(const File& file, const Extent& frame, Index limit, Index at);
  Status decode_whole(const ChunkLayout& layout, const File& file, Fragment& chunk, Index bytes, Index at,
                      const std::string& place);

  Catalog& catalog_;
  FilePool& files_;
  std::unordered_map<std::string, StoredArray> stored_;  // of each tensor that is not located yet
  Spool memory_{"(chunks decoded in memory)"}, disk_{"(decoded chunks)"};
  Spool* spool_ = &disk_;    // the one that the current locate() decodes into
  std::mutex large_window_;  // held while a frame is decoded that needs much memory
};

}  // namespace reshard::orbax
