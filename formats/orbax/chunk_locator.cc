// SPDX-License-Identifier: Apache-2.0
#include "formats/orbax/chunk_locator.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "formats/encoding/zstd_frame.h"
#include "formats/orbax/item_metadata.h"
#include "lib/base/memory_limit.h"
#include "lib/base/names.h"
#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/device/blosc.h"
#include "lib/device/codec.h"
#include "lib/device/crc32.h"

namespace reshard::orbax {
namespace {

constexpr Index kBatch = 4096;  // chunks located at a time
// Chunks up to the first size, of tensors up to the second, are decoded each time they are read. A target with other
// cuts or a transpose would decode larger ones many times.
constexpr Index kMaxInPlace = Index{8} << 20, kMaxTensorInPlace = Index{32} << 20;
// Chunks are decoded into memory if this much is left for the job itself, which is what most jobs may take at all.
constexpr Index kLeftForTheJob = Index{256} << 20;

std::string chunk_text(const Tensor& tensor, const Box& box) { return tensor_text(tensor.name) + " " + to_string(box); }

// Returns the number of inner chunks in a shard; 1 without sharding.
Index chunks_of_item(const ZarrArray& array) {
  Index out = 1;
  for (int d = 0; d < array.shape.rank(); ++d) out *= array.grid[d] / array.chunk.shape[d];
  return out;
}

// Removes the CRC-32C at the end of an extent, after checking it against the bytes before it.
Status take_crc(const File& file, Extent& extent, const std::string& place) {
  constexpr Index kPiece = Index{1} << 20, kChecksum = 4;
  if (extent.length < kChecksum) return corrupt(place + ": crc32c: expected a checksum");
  extent.length -= kChecksum;
  std::vector<std::byte> buffer(std::min(extent.length, kPiece));
  std::uint32_t crc = 0, recorded = 0;
  for (Index done = 0; done < extent.length;) {
    const auto piece = MutableBytes(buffer).first(std::min(kPiece, extent.length - done));
    TRY(file.read_at(extent.offset + done, piece));
    crc = crc32c(crc, piece);
    done += std::ssize(piece);
  }
  TRY(file.read_at(extent.offset + extent.length, std::as_writable_bytes(std::span(&recorded, 1))));
  if (crc == recorded) return {};
  return corrupt(place + ": crc32c: expected " + std::to_string(recorded) + ", got " + std::to_string(crc) +
                 ": the bytes changed after they were saved");
}

// Maps a range of a file in memory, so that its pages count as resident memory of this process.
std::shared_ptr<const void> map_pages(const File& file, Index begin, Index length) {
  const auto size = static_cast<std::size_t>(length);
  void* const pages = ::mmap(nullptr, size, PROT_READ, MAP_SHARED | MAP_POPULATE, file.descriptor(), begin);
  if (pages == MAP_FAILED) return nullptr;
  return {pages, [size](void* p) { ::munmap(p, size); }};
}

}  // namespace

Index chunk_bytes(const ZarrArray& array) { return volume(array.chunk.shape) * byte_size(array.dtype); }

bool is_read_in_place(const Tensor& tensor, const ZarrArray& array) {
  if (array.chunk.is_plain() || array.chunk.is_blosc) return !array.chunk.is_blosc;
  return chunk_bytes(array) <= kMaxInPlace && tensor.bytes() <= kMaxTensorInPlace;
}

Result<Fragment> ChunkLocator::missing_chunk(const Tensor& tensor, const StoredArray& stored, const Box& box) const {
  const std::string what = catalog_.root + ": " + chunk_text(tensor, box) + ": chunk is not stored";
  if (stored.stores_fill_values)
    return corrupt(what + ", and " + std::string(kItemMetadata) +
                   " says that chunks of the fill value are stored, too: it was lost");
  if (!stored.fill) return unsupported(what + ", and its fill value is not supported");
  Fragment out;
  out.box = box;
  out.strides = Dims::filled(box.rank(), 0);
  out.extent = *stored.fill;
  return out;
}

// Returns a stored chunk without its encoding, which the caller adds.
Result<Fragment> ChunkLocator::whole_chunk(const Tensor& tensor, const StoredArray& stored, const Box& box,
                                           const Extent& extent) {
  const ZarrArray& array = stored.array;
  const Index bytes = chunk_bytes(array);
  const bool is_plain = array.chunk.is_plain();
  // Incompressible data grows only a little.
  const Index longest = is_plain ? bytes : checked_add(bytes, bytes / 8 + 4096).value_or(bytes);
  if (extent.length > longest || (is_plain && extent.length != bytes))
    return corrupt(at(catalog_.file_path(extent.file), extent.offset) + ": " + chunk_text(tensor, box) +
                   ": expected a chunk of " + (is_plain ? "" : "at most ") + bytes_of(longest) + ", got " +
                   std::to_string(extent.length));
  Fragment out;
  out.box = box;
  out.strides = array.chunk.strides();
  out.extent = extent;
  out.big_endian = array.is_big_endian;
  return out;
}

Result<Fragment> ChunkLocator::stored_chunk(const Tensor& tensor, const StoredArray& stored, const Box& box,
                                            const Extent& extent) {
  if (tensor.located) {
    Fragment out = TRY(whole_chunk(tensor, stored, box, extent));
    out.encoding = stored.encoding;
    return out;
  }
  return dense_fragment(box, extent);
}

// ---- Locating chunks

// Reserves space in the spool for every chunk that is decoded into it.
Status ChunkLocator::make_room(const std::vector<Tensor*>& tensors, const std::string& spool) {
  std::optional<Index> bytes = 0;
  for (const Tensor* tensor : tensors) {
    const ZarrArray& array = stored_.at(tensor->name).array;
    if (is_read_in_place(*tensor, array)) continue;
    const auto chunks = checked_mul(std::ssize(tensor->fragments), chunks_of_item(array));
    const auto size = chunks ? checked_mul(*chunks, chunk_bytes(array)) : std::nullopt;
    bytes = bytes && size ? checked_add(*bytes, *size) : std::nullopt;
  }
  if (bytes == 0) return {};
  if (!bytes) return unsupported(catalog_.root + ": compressed chunks of 2^63 bytes and more");
  return make_room_in_memory(*bytes, spool.empty()) ? Status() : make_room_on_disk(*bytes, spool);
}

// Takes memory for decoded chunks if there is a limit and at least as much again is left, or if it must. Returns
// whether it did.
bool ChunkLocator::make_room_in_memory(Index bytes, bool must) {
  const auto left = memory_left();
  if (!must && (!left || bytes > *left / 2 || bytes > *left - kLeftForTheJob)) return false;
  const Index page = ::sysconf(_SC_PAGESIZE);
  memory_.used = ceil_div(memory_.used, page) * page;
  if (!extend(memory_, bytes, [] { return File::create_in_memory(); })) return false;
  auto pages = map_pages(*memory_.open, memory_.used, bytes);
  if (!pages) return false;
  memory_.pages.push_back(std::move(pages));
  spool_ = &memory_;
  return true;
}

Status ChunkLocator::make_room_on_disk(Index bytes, const std::string& directory) {
  if (const Index free = TRY(free_space(directory)); bytes > free)
    return io_error(directory + ": decoding compressed chunks needs room for " + human_bytes(bytes) + " there, and " +
                    human_bytes(free) + " are free");
  spool_ = &disk_;
  return extend(disk_, bytes, [&] { return File::create_anonymous(directory); });
}

// Makes a spool longer by `bytes`, after it was created at the first call.
Status ChunkLocator::extend(Spool& spool, Index bytes, const std::function<Result<File>()>& create) {
  if (!spool.open) {
    spool.file = static_cast<std::uint32_t>(catalog_.files.size());
    File file = TRY(create());
    catalog_.files.push_back({std::string(spool.name), 0});
    files_.pin(catalog_.file_path(spool.file), std::move(file));
    spool.open = TRY(files_.open(catalog_.file_path(spool.file)));
  }
  catalog_.files[spool.file].size = spool.used + bytes;
  return spool.open->set_length(spool.used + bytes);
}

Status ChunkLocator::locate(const std::vector<Tensor*>& tensors, int threads, const std::string& spool) {
  TRY(make_room(tensors, spool));
  std::vector<Job> jobs;
  for (std::size_t t = 0; t < tensors.size();) {
    const std::size_t begin = t;
    jobs.clear();
    for (; t < tensors.size() && std::ssize(jobs) < kBatch; ++t) {
      const StoredArray& stored = stored_.at(tensors[t]->name);
      const bool is_spooled = !is_read_in_place(*tensors[t], stored.array);
      for (std::size_t i = 0; i < tensors[t]->fragments.size(); ++i) {
        jobs.push_back({tensors[t], &stored, tensors[t]->fragments.get(i), spool_->used});
        if (is_spooled) spool_->used += chunks_of_item(stored.array) * chunk_bytes(stored.array);
      }
    }
    TRY(locate_batch(jobs, threads));
    auto job = jobs.cbegin();
    for (std::size_t i = begin; i < t; ++i) {
      FragmentList chunks(tensors[i]->shape.rank());
      for (; job != jobs.cend() && job->tensor == tensors[i]; ++job)
        for (const Fragment& chunk : job->chunks) {
          chunks.add(chunk);
          catalog_.shares_extents = catalog_.shares_extents || job->stored->is_fill(chunk);
        }
      chunks.pack();
      tensors[i]->fragments = std::move(chunks);
      tensors[i]->located = true;
    }
  }
  return {};
}

Status ChunkLocator::locate_batch(std::vector<Job>& jobs, int threads) {
  TRY(may_take(std::ssize(jobs) * static_cast<Index>(sizeof(Job) + sizeof(Fragment)),
               [&] { return catalog_.root + ": the places of " + count_of(std::ssize(jobs), "chunk"); }));
  return parallel_for(std::ssize(jobs), thread_count(threads), [&](int, Index i) { return locate_item(jobs[i]); });
}

Status ChunkLocator::locate_item(Job& job) {
  const ZarrArray& array = job.stored->array;
  if (array.shards)
    TRY(locate_in_shard(job));
  else
    job.chunks.push_back(TRY(whole_chunk(*job.tensor, *job.stored, job.item.box, job.item.extent)));
  if (array.chunk.is_plain()) return {};
  if (!is_read_in_place(*job.tensor, array)) {
    for (std::size_t i = 0; i < job.chunks.size(); ++i)
      if (!job.stored->is_fill(job.chunks[i]))
        TRY(decode_to_spool(job, job.chunks[i], job.spool_at + static_cast<Index>(i) * chunk_bytes(array)));
    return {};
  }
  for (Fragment& chunk : job.chunks)
    if (!job.stored->is_fill(chunk)) chunk.encoding = job.stored->encoding;
  return {};
}

Status ChunkLocator::locate_in_shard(Job& job) {
  const ZarrArray& array = job.stored->array;
  const Extent& shard = job.item.extent;
  const auto file = TRY(files_.open(catalog_.file_path(shard.file)));
  const std::string place = at(file->path(), shard.offset) + ": " + chunk_text(*job.tensor, job.item.box);
  const IndexPlace where = TRY(place_of_index(array, shard.length).context(place));
  TRY(may_take(2 * where.length, [&] { return place; }));
  std::vector<std::byte> index(where.length);
  TRY(file->read_at(shard.offset + where.offset, index));
  const std::vector<InnerChunk> inner = TRY(parse_shard_index(array, index, shard.length).context(place));
  for (const InnerChunk& chunk : inner) {
    Box box = chunk.box;
    for (int d = 0; d < box.rank(); ++d) box.origin[d] += job.item.box.origin[d];
    bool is_outside = false;  // beyond the end of the array
    for (int d = 0; d < box.rank(); ++d) is_outside = is_outside || box.origin[d] >= array.shape[d];
    if (is_outside) continue;
    box = intersect(box, whole(array.shape));
    if (!chunk.bytes)
      job.chunks.push_back(TRY(missing_chunk(*job.tensor, *job.stored, box)));
    else
      job.chunks.push_back(TRY(whole_chunk(*job.tensor, *job.stored, box,
                                           {shard.file, shard.offset + chunk.bytes->first, chunk.bytes->second})));
  }
  return {};
}

// ---- Decoding

Status ChunkLocator::decode_to_spool(const Job& job, Fragment& chunk, Index at) {
  const ZarrArray& array = job.stored->array;
  const auto file = TRY(files_.open(catalog_.file_path(chunk.extent.file)));
  const std::string place = reshard::at(file->path(), chunk.extent.offset) + ": " + chunk_text(*job.tensor, chunk.box);
  ChunkLayout layout = array.chunk;
  std::vector<ChunkFilter>& filters = layout.filters;
  while (!filters.empty() && filters.back().kind == ChunkFilter::Kind::kCrc32c) {
    TRY(take_crc(*file, chunk.extent, place));
    filters.pop_back();
  }
  const Index bytes = chunk_bytes(array);
  const bool is_frame = filters.size() == 1 && filters[0].kind == ChunkFilter::Kind::kZstd;
  Index length = chunk.extent.length;
  if (is_frame)
    length = TRY(decode_frame(*file, chunk.extent, bytes, at).context(chunk_text(*job.tensor, chunk.box)));
  else if (!layout.is_plain())
    return decode_whole(layout, *file, chunk, bytes, at, place);
  if (length != bytes)
    return corrupt(place + ": chunk: expected " + bytes_of(bytes) + ", got " + std::to_string(length));
  if (is_frame) chunk.extent = {spool_->file, at, bytes};
  return {};
}

// Decodes a zstd frame into the spool, piece by piece. Returns its decoded size.
Result<Index> ChunkLocator::decode_frame(const File& file, const Extent& frame, Index limit, Index at) {
  constexpr Index kSmallWindow = Index{8} << 20, kStart = 18;
  std::vector<std::byte> start(std::min(frame.length, kStart));
  TRY(file.read_at(frame.offset, start));
  const Index window = zstd::window_bytes(start);
  std::unique_lock lock(large_window_, std::defer_lock);
  if (window > kSmallWindow) {
    lock.lock();
    TRY(may_take(std::min(window, limit), [&] { return reshard::at(file.path(), frame.offset) + ": a zstd frame"; }));
  }
  return zstd::decode(file, frame.offset, frame.length, limit, *spool_->open, at);
}

// Decodes a chunk of other codecs in memory, then writes it to the spool.
Status ChunkLocator::decode_whole(const ChunkLayout& layout, const File& file, Fragment& chunk, Index bytes, Index at,
                                  const std::string& place) {
  constexpr Index kMaxWhole = Index{1} << 30;
  if (bytes > kMaxWhole || chunk.extent.length > 2 * kMaxWhole)
    return unsupported(place + ": a chunk of " + human_bytes(bytes) + "; of these codecs, at most " +
                       human_bytes(kMaxWhole) + " are read");
  const std::unique_lock lock(large_window_);
  TRY(may_take(chunk.extent.length + 2 * bytes, [&] { return place; }));
  std::vector<std::byte> stored(chunk.extent.length);
  TRY(file.read_at(chunk.extent.offset, stored));
  if (layout.is_blosc) {
    std::vector<std::byte> decoded(bytes);
    if (const std::size_t length = TRY(unblosc_chunk(stored, decoded, place)); length != decoded.size())
      return corrupt(place + ": chunk: expected " + bytes_of(decoded.size()) + ", got " + std::to_string(length));
    TRY(spool_->open->write_at(at, decoded));
  } else {
    ChunkDecoder decoder;
    TRY(spool_->open->write_at(at, TRY(decoder.decode(stored, {layout.filters, bytes}, place))));
  }
  chunk.extent = {spool_->file, at, bytes};
  return {};
}

}  // namespace reshard::orbax
