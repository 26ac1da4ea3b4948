// SPDX-License-Identifier: Apache-2.0
// Writes an item as the first process of a save would: a database of arrays (zarr.h). Every offset of an uncompressed
// chunk is known before a byte is written. Compressed chunks replace those in the files of chunks, in the same order
// and without the gaps between them.
//
//   _METADATA _sharding array_metadatas/process_0 _strings.json _CHECKPOINT_METADATA
//   _reshard_objects.json _reshard_objects.bin           objects that JAX has no type for (item_metadata.h)
//   manifest.ocdbt  d/0...1                              the database, and its nodes
//   ocdbt.process_0/d/0...1 0...2 ...                    chunks
#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "formats/encoding/zstd_frame.h"
#include "formats/orbax/chunk_grid.h"
#include "formats/orbax/item_content.h"
#include "formats/orbax/item_metadata.h"
#include "formats/orbax/ocdbt.h"
#include "formats/orbax/ocdbt_writer.h"
#include "formats/orbax/orbax.h"
#include "formats/orbax/train_state.h"
#include "formats/orbax/zarr.h"
#include "formats/tensor_files/parameter_lists.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/device/chunk_assembler.h"

namespace reshard::orbax {
namespace {

// A chunk is read whole by JAX, even if a device needs only a part of it.
constexpr Index kMaxChunk = Index{32} << 20;
constexpr Index kMaxCompressedChunk = Index{4} << 20;  // smaller, as several wait for their bytes
constexpr Index kAlignFrom = Index{64} << 10;          // larger chunks begin at a page
constexpr Index kMaxBytes = Index{1} << 62;            // limit for all tensors

class OrbaxTarget : public Target, private DataEncoder {
 public:
  OrbaxTarget(LayoutRequest request, int zarr_version)
      : request_(std::move(request)), form_{zarr_version, request_.compression.zstd_level} {
    if (is_compressed()) encoder_ = this;
  }

  Status lay_out();
  bool wants_crcs() const override { return false; }
  Status seal(const PayloadCrc& crc, const EmitBytes& emit) const override;
  Status seal_at(const Extent& place, const PayloadCrc& crc, const EmitBytes& emit) const override;

 private:
  // The place of a compressed chunk.
  struct Stored {
    Index offset = 0, length = 0;
  };

  Status encode(Index offset, Bytes bytes, const EmitChunk& emit) override;
  Index chunk_count() const override { return std::ssize(stored_); }
  Result<Index> place(const EncodedChunk& chunk) override;
  Index worker_bytes() const override {
    return kMaxCompressedChunk + zstd::FrameEncoder::memory(form_.zstd_level, kMaxCompressedChunk);
  }
  bool is_compressed() const { return form_.zstd_level > 0; }
  Index stored_bytes(std::size_t tensor) const {
    return volume(content_.grids[tensor]) * byte_size(catalog_.tensors()[tensor].dtype);
  }
  std::size_t tensor_at(Index offset) const;
  std::size_t chunk_at(std::size_t tensor, Index offset) const;
  Status measure_texts();
  Status store_chunk(Index number, Bytes chunk, const EmitChunk& emit);
  // A text file, whose content is computed each time it is needed.
  struct Text {
    std::uint32_t file = 0;
    std::function<Status(const EmitText& emit)> write;
  };

  Status add_tensor(TargetTensor& wanted);
  Extent place_chunk(Index bytes, Index stored);
  Status add_texts();
  Status add_text(std::string name, std::function<Status(const EmitText& emit)> write);
  Status write_database(const EmitText& node, std::string& manifest) const;
  Status write_arrays(DatabaseWriter& database) const;
  Status seal_gap(const Extent& gap, const EmitBytes& emit) const;

  LayoutRequest request_;  // its tensors' names move to the catalog
  const ZarrForm form_;
  ItemContent content_{request_, catalog_};
  std::vector<Extent> gaps_;  // bytes of the chunks' files that belong to no tensor, in order
  std::uint32_t chunk_files_ = 0;
  std::vector<Text> texts_;

  // Of compressed chunks.
  std::vector<Index> first_chunk_;       // of each tensor: the number of its first chunk
  std::vector<Stored> stored_;           // by number
  Index placed_ = 0, placed_bytes_ = 0;  // chunks that have a place
  ChunkAssembler assembler_;
  zstd::FrameEncoder frames_{form_.zstd_level, kMaxCompressedChunk};
};

std::string hex_name(std::string_view directory, Index number) {
  std::array<char, 33> digits{};
  std::snprintf(digits.data(), digits.size(), "%032llx", static_cast<unsigned long long>(number));
  return std::string(directory) + digits.data();
}

// Returns the place of a chunk whose `stored` bytes contain `bytes` bytes of elements.
Extent OrbaxTarget::place_chunk(Index bytes, Index stored) {
  if (chunk_files_ == 0 || (!is_compressed() && catalog_.files.back().size > 0 &&
                            stored > request_.max_file_bytes - catalog_.files.back().size)) {
    ++chunk_files_;
    catalog_.files.push_back({hex_name(std::string(kProcessPrefix) + "0/d/", chunk_files_), 0});
  }
  const auto file = static_cast<std::uint32_t>(catalog_.files.size() - 1);
  Index& size = catalog_.files.back().size;
  const bool is_aligned = stored >= kAlignFrom && !is_compressed();
  const Index begin = is_aligned ? ceil_div(size, File::kDirectUnit) * File::kDirectUnit : size;
  if (begin > size) gaps_.push_back({file, size, begin - size});
  size = begin + stored;
  if (stored > bytes) gaps_.push_back({file, begin + bytes, stored - bytes});
  return {file, begin, bytes};
}

Status OrbaxTarget::add_tensor(TargetTensor& wanted) {
  const auto elements = checked_volume(wanted.shape);
  const auto bytes = elements ? checked_mul(*elements, byte_size(wanted.dtype)) : std::nullopt;
  if (!bytes || *bytes > kMaxBytes) return unsupported(tensor_text(wanted.name) + ": 2^62 bytes or more");
  if (!is_utf8(wanted.name)) return unsupported(tensor_text(wanted.name) + ": the name is not UTF-8");
  const Dims grid = chunk_shape_of(wanted, request_.mesh, is_compressed() ? kMaxCompressedChunk : kMaxChunk);
  if (!zarr_text(form_, wanted.dtype, wanted.shape, grid))
    return unsupported(tensor_text(wanted.name) + ": zarr has no dtype for " +
                       std::string(info(wanted.dtype).torch_name) + "; leave it out with --exclude");
  Tensor tensor;
  tensor.dtype = wanted.dtype;
  tensor.shape = wanted.shape;
  tensor.fragments = FragmentList(wanted.shape.rank());
  const Index stored = volume(grid) * byte_size(wanted.dtype);
  const Dims counts = counts_of(wanted.shape, grid);
  const Index chunks = volume(counts);
  if (is_compressed()) {
    first_chunk_.push_back(std::ssize(stored_));
    stored_.resize(stored_.size() + static_cast<std::size_t>(chunks));
  }
  if (chunks == 0) tensor.fragments.add(whole(wanted.shape), place_chunk(0, 0));
  for (Index i = 0; i < chunks; ++i) {
    Box box{Dims::filled(counts.rank(), 0), grid};
    Index left = i;
    for (int d = counts.rank() - 1; d >= 0; left /= counts[d--]) box.origin[d] = left % counts[d] * grid[d];
    box = intersect(box, whole(wanted.shape));
    tensor.fragments.add(box, place_chunk(volume(box.shape) * byte_size(wanted.dtype), stored));
    if (catalog_.files.back().size > kMaxBytes)
      return unsupported(tensor_text(wanted.name) + ": 2^62 bytes or more in one file");
  }
  tensor.fragments.pack();
  tensor.name = std::move(wanted.name);
  tensor.plain_key = std::move(wanted.plain_key);
  tensor.path = std::move(wanted.path);
  content_.grids.push_back(grid);
  return catalog_.add(std::move(tensor));
}

Status OrbaxTarget::lay_out() {
  set_tree_names(request_);
  TRY(catalog_.reserve(request_.tensors.size()));
  content_.grids.reserve(request_.tensors.size());
  for (TargetTensor& tensor : request_.tensors) TRY(add_tensor(tensor));
  TRY(content_.find_tree());
  return add_texts();
}

Status OrbaxTarget::add_text(std::string name, std::function<Status(const EmitText& emit)> write) {
  Index size = 0;
  TRY(write([&](std::string_view text) -> Status {
    size += std::ssize(text);
    return {};
  }));
  texts_.push_back({static_cast<std::uint32_t>(catalog_.files.size()), std::move(write)});
  catalog_.files.push_back({std::move(name), size});
  return {};
}

Status OrbaxTarget::add_texts() {
  const auto fixed = [](std::string text) {
    return [text = std::move(text)](const EmitText& emit) { return emit(text); };
  };
  TRY(add_text(hex_name("d/", 1), [this](const EmitText& emit) {
    std::string unused;
    return write_database(emit, unused);
  }));
  TRY(add_text(std::string(kManifest), [this](const EmitText& emit) -> Status {
    std::string manifest;
    TRY(write_database([](std::string_view) { return Status(); }, manifest));
    return emit(manifest);
  }));
  TRY(add_text(std::string(kItemMetadata),
               [this](const EmitText& emit) { return content_.write_item_metadata(form_.version, emit); }));
  TRY(add_text(std::string(kArrayMetadatas) + "/process_0",
               [this](const EmitText& emit) { return content_.write_array_metadata(emit); }));
  if (content_.has_sharding())
    TRY(add_text(std::string(kSharding), [this](const EmitText& emit) { return content_.write_sharding(emit); }));
  if (content_.has_strings()) TRY(add_text(std::string(kStrings), fixed(content_.strings())));
  if (!request_.blobs.empty()) {
    TRY(add_text(std::string(kObjects), fixed(content_.objects())));
    TRY(add_text(std::string(kObjectBytes), [this](const EmitText& emit) -> Status {
      for (const TargetBlob& blob : request_.blobs) TRY(emit(blob.bytes));
      return {};
    }));
  }
  return add_text(std::string(kCheckpointMetadata),
                  fixed(to_text(Json::object()
                                    .set("item_handlers",
                                         "orbax.checkpoint._src.handlers.standard_checkpoint_handler."
                                         "StandardCheckpointHandler")
                                    .set("metrics", Json::object())
                                    .set("performance_metrics", Json::object())
                                    .set("init_timestamp_nsecs", Json())
                                    .set("commit_timestamp_nsecs", Json())
                                    .set("custom_metadata", Json::object()))));
}

// ---- Contents of the files

Status OrbaxTarget::write_arrays(DatabaseWriter& database) const {
  for (const std::uint32_t i : content_.sorted()) {
    const std::string& name = content_.name_of(i);
    const Dims grid = content_.grid_of(i);
    const bool is_key = content_.is_random_key(i);
    const DType dtype = is_key ? DType::kUint32 : catalog_.tensors()[i].dtype;
    const Dims shape = is_key ? grid : catalog_.tensors()[i].shape;
    const Dims counts = counts_of(shape, grid);
    const auto add = [&](const std::string& key, Index number) {
      if (is_key) return database.add_inline(key, content_.random_key(i).numbers);
      Extent place = catalog_.tensors()[i].fragments.extent(number);
      place.length = volume(grid) * byte_size(dtype);  // with its padding
      if (is_compressed()) {
        const Stored& stored = stored_[first_chunk_[i] + number];
        place = {0, stored.offset, stored.length};
      }
      return database.add(key, place);
    };
    // A random key's array is not compressed.
    const ZarrForm form{form_.version, is_key ? 0 : form_.zstd_level};
    const auto add_metadata = [&] {
      return database.add_inline(name + std::string(form.metadata_suffix()), *zarr_text(form, dtype, shape, grid));
    };
    if (form.version == 2) TRY(add_metadata());
    const bool is_scalar = shape.rank() == 0;
    if (volume(counts) > 0 && form.version == 3) TRY(each_key(counts, 0, name + "/c", "/", "/", 0, add));
    if (volume(counts) > 0 && form.version == 2)
      TRY(each_key(counts, 0, name + (is_scalar ? "/0" : "/"), "", ".", 0, add));
    if (form.version == 3) TRY(add_metadata());
  }
  return {};
}

// Writes the nodes, and sets the manifest.
Status OrbaxTarget::write_database(const EmitText& node, std::string& manifest) const {
  DatabaseWriter database(catalog_.files, hex_name("d/", 1), node);
  TRY(write_arrays(database));
  manifest = TRY(database.finish());
  return {};
}

Status OrbaxTarget::seal_gap(const Extent& gap, const EmitBytes& emit) const {
  static constexpr std::array<std::byte, std::size_t{64} << 10> kZeros{};
  for (Index done = 0; done < gap.length;) {
    const auto zeros = Bytes(kZeros).first(std::min(std::ssize(kZeros), gap.length - done));
    TRY(emit(gap.file, gap.offset + done, zeros));
    done += std::ssize(zeros);
  }
  return {};
}

Status OrbaxTarget::seal(const PayloadCrc&, const EmitBytes& emit) const {
  if (const auto number = assembler_.incomplete())
    return internal_error("chunk " + std::to_string(*number) + " was not written completely");
  for (const Text& text : texts_) {
    Index at = 0;
    TRY(text.write([&](std::string_view bytes) -> Status {
      TRY(emit(text.file, at, as_bytes(bytes)));
      at += std::ssize(bytes);
      return {};
    }));
  }
  return {};
}

// ---- Compression

// The uncompressed chunks are one file, the first, and so are the compressed ones, in the same order.

// Returns the tensor that has bytes at this offset of the uncompressed file.
std::size_t OrbaxTarget::tensor_at(Index offset) const {
  const auto& tensors = catalog_.tensors();
  const auto next = std::upper_bound(tensors.begin(), tensors.end(), offset, [](Index place, const Tensor& tensor) {
    return place < tensor.fragments.extent(0).offset;
  });
  return static_cast<std::size_t>(next - tensors.begin()) - 1;  // the first tensor begins at offset 0
}

// Returns the number of a tensor's chunk at this offset.
std::size_t OrbaxTarget::chunk_at(std::size_t tensor, Index offset) const {
  const FragmentList& chunks = catalog_.tensors()[tensor].fragments;
  std::size_t begin = 0, end = chunks.size();
  while (end - begin > 1) {
    const std::size_t middle = begin + (end - begin) / 2;
    (chunks.extent(middle).offset <= offset ? begin : end) = middle;
  }
  return begin;
}

Status OrbaxTarget::encode(Index offset, Bytes bytes, const EmitChunk& emit) {
  const std::size_t tensor = tensor_at(offset);
  const Index all = stored_bytes(tensor);  // of a chunk, with its padding
  const auto what = [&] { return tensor_text(catalog_.tensors()[tensor].name); };
  while (!bytes.empty()) {
    const std::size_t chunk = chunk_at(tensor, offset);
    const Extent extent = catalog_.tensors()[tensor].fragments.extent(chunk);
    const Index at = offset - extent.offset, number = first_chunk_[tensor] + static_cast<Index>(chunk);
    if (at >= extent.length) return internal_error(what() + ": bytes to encode reach past it");
    const Bytes part = bytes.first(std::min(extent.length - at, std::ssize(bytes)));
    if (std::ssize(part) == all) {
      TRY(store_chunk(number, part, emit));
    } else {
      const auto done = TRY(assembler_.add({number, at, extent.length, all}, part, what));
      if (!done.empty()) TRY(store_chunk(number, done, emit));
    }
    bytes = bytes.subspan(part.size());
    offset += std::ssize(part);
  }
  return {};
}

Status OrbaxTarget::store_chunk(Index number, Bytes chunk, const EmitChunk& emit) {
  return frames_.encode(chunk, [&](Bytes frame) { return emit({number, std::ssize(frame)}, frame); });
}

Result<Index> OrbaxTarget::place(const EncodedChunk& chunk) {
  const Index out = std::exchange(placed_bytes_, placed_bytes_ + chunk.bytes);
  stored_[chunk.number] = {out, chunk.bytes};
  if (++placed_ == chunk_count()) TRY(measure_texts());
  return out;
}

// Sets the lengths of the files, which the sizes of all chunks decide.
Status OrbaxTarget::measure_texts() {
  catalog_.files[0].size = placed_bytes_;
  for (const Text& text : texts_) {
    Index& size = catalog_.files[text.file].size;
    size = 0;
    TRY(text.write([&](std::string_view bytes) -> Status {
      size += std::ssize(bytes);
      return {};
    }));
  }
  return {};
}

Status OrbaxTarget::seal_at(const Extent& place, const PayloadCrc&, const EmitBytes& emit) const {
  const Index end = place.offset + place.length;
  for (const Text& text : texts_) {
    if (text.file != place.file) continue;
    Index at = 0;
    return text.write([&](std::string_view bytes) -> Status {
      const Index begin = std::exchange(at, at + std::ssize(bytes));
      if (at <= place.offset || begin >= end) return {};
      return emit(text.file, begin, as_bytes(bytes));
    });
  }
  const auto ends_before = [](const Extent& gap, const Extent& p) {
    return std::pair(gap.file, gap.offset + gap.length) <= std::pair(p.file, p.offset);
  };
  for (auto gap = std::lower_bound(gaps_.begin(), gaps_.end(), place, ends_before);
       gap != gaps_.end() && gap->file == place.file && gap->offset < end; ++gap)
    TRY(seal_gap(*gap, emit));
  return {};
}

Result<std::unique_ptr<Target>> lay_out_version(LayoutRequest request, int zarr_version) {
  TRY(rename_parameter_lists(request));
  auto target = std::make_unique<OrbaxTarget>(std::move(request), zarr_version);
  TRY(target->lay_out());
  return std::unique_ptr<Target>(std::move(target));
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) { return lay_out_version(std::move(request), 3); }

Result<std::unique_ptr<Target>> lay_out_zarr2(LayoutRequest request) { return lay_out_version(std::move(request), 2); }

}  // namespace reshard::orbax
