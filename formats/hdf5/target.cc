// SPDX-License-Identifier: Apache-2.0
#include <hdf5.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "formats/encoding/key_path.h"
#include "formats/hdf5/hdf5.h"
#include "formats/hdf5/library.h"
#include "formats/hdf5/memory_driver.h"
#include "formats/hdf5/names.h"
#include "formats/hdf5/types.h"
#include "formats/tensor_files/parameter_lists.h"
#include "lib/base/text.h"
#include "lib/device/chunk_assembler.h"
#include "lib/device/codec.h"

namespace reshard::hdf5 {
namespace {

constexpr Index kChunkBytes = Index{1} << 20;
constexpr Index kAlignFrom = Index{64} << 10;      // larger allocations begin at a page
constexpr Index kMetadataBlock = Index{16} << 10;  // size of the blocks in which metadata are allocated
constexpr unsigned kNothingApplied = 0b11;         // filter mask of a chunk that is neither shuffled nor compressed

// The chunks of a tensor: `count` indices of dimension `dim`, one index of each dimension before it, all of those after
// it. So each chunk is a run of the row-major tensor.
struct Chunking {
  Dims shape;              // of a chunk
  Index bytes = 0;         // of a chunk
  Index column_bytes = 0;  // bytes for all indices of `dim`; the last chunk of a column may be short
  Index per_column = 0;    // chunks
  int dim = 0;
};

Chunking chunking_of(const Dims& shape, Index element_bytes) {
  Chunking c;
  Index inner = element_bytes;
  for (int d = 1; d < shape.rank(); ++d) inner *= shape[d];
  while (inner > kChunkBytes && c.dim + 1 < shape.rank()) inner /= shape[++c.dim];
  Index count = 1;
  while (2 * count * inner <= kChunkBytes) count *= 2;
  count = std::min(count, shape[c.dim]);
  c.shape = shape;
  for (int d = 0; d < c.dim; ++d) c.shape[d] = 1;
  c.shape[c.dim] = count;
  c.bytes = count * inner;
  c.column_bytes = shape[c.dim] * inner;
  c.per_column = ceil_div(shape[c.dim], count);
  return c;
}

// Returns the origin of chunk k.
Dims chunk_origin(const Chunking& c, const Dims& shape, Index k) {
  Dims origin = Dims::filled(shape.rank(), 0);
  origin[c.dim] = k % c.per_column * c.shape[c.dim];
  k /= c.per_column;
  for (int d = c.dim - 1; d >= 0; --d) {
    origin[d] = k % shape[d];
    k /= shape[d];
  }
  return origin;
}

// A tensor in the image of uncompressed data.
struct Item {
  std::size_t tensor = 0;
  Index begin = 0;    // in the image
  Index address = 0;  // in the file, if the data are uncompressed
  Handle dataset;     // open if the data is chunked
  std::optional<Chunking> chunking;
  Index first_chunk = 0;  // number of its first chunk; an unchunked tensor counts as one chunk
};

class Hdf5Target : public Target, private DataEncoder, private SingleFile {
 public:
  explicit Hdf5Target(LayoutRequest request) : request_(std::move(request)) {
    if (level() > 0) encoder_ = this;
    single_file_ = this;
  }
  ~Hdf5Target() override {
    const LibraryLock lock;
    close();
  }

  Status lay_out();
  bool wants_crcs() const override { return false; }
  Status seal(const PayloadCrc& crc, const EmitBytes& emit) const override;

 private:
  Result<bool> is_own_file(const std::string& path) const override {
    return is_hdf5_file(TRY(PathSnapshot::look(path)));
  }
  Status add_side_file(const std::string& name, std::string_view contents) override;
  Index sealed_size() const override { return image_->end; }

  Status encode(Index offset, Bytes bytes, const EmitChunk& emit) override;
  Index chunk_count() const override { return chunks_; }
  Result<Index> place(const EncodedChunk& chunk) override;
  Index worker_bytes() const override { return 2 * kChunkBytes + encoder_bytes(); }

  int level() const { return request_.compression.zstd_level; }
  Index encoder_bytes() const { return ChunkEncoder::memory(level(), kChunkBytes); }
  Status create_file();
  Status add_tensor(const TargetTensor& wanted, const std::string& path);
  Result<Handle> create_dataset(const std::string& path, DType dtype, const Dims& shape, const Chunking* chunking);
  Status describe(const Handle& dataset, const std::string& name, const std::string& path, const KeyPath& key);
  Result<Index> address_of(const Handle& dataset, const std::string& name);
  Status add_blob(const TargetBlob& blob, Index number);
  Status encode_chunked(const Item& item, Index begin, Bytes bytes, const EmitChunk& emit);
  Status store_chunk(const Item& item, Index chunk, Bytes whole, const EmitChunk& emit);
  std::unique_ptr<ChunkEncoder> take_encoder();
  void close() const;

  LayoutRequest request_;
  // Behind pointers, because seal() is const but closes the file.
  std::unique_ptr<MemoryImage> image_ = std::make_unique<MemoryImage>();
  std::unique_ptr<Handle> file_ = std::make_unique<Handle>();
  std::unique_ptr<DatasetMaker> datasets_ = std::make_unique<DatasetMaker>();
  std::unique_ptr<std::vector<Item>> items_ = std::make_unique<std::vector<Item>>();  // sorted by `begin`
  std::vector<Index> blob_places_;
  Index chunks_ = 0;

  std::vector<std::byte> unread_;  // a buffer of a chunk's size, protected by the library's lock
  ChunkAssembler assembler_;
  std::mutex mutex_;  // protects idle_
  std::vector<std::unique_ptr<ChunkEncoder>> idle_;
};

void Hdf5Target::close() const {
  items_->clear();
  *file_ = Handle();
}

Status Hdf5Target::create_file() {
  const Handle access = TRY(checked(memory_file_access(*image_), ErrorCode::kInternal, "HDF5 file"));
  const Handle creation = TRY(DatasetMaker::file_properties());
  // Store the links of a group in its header, which every library since 1.8 reads.
  const bool set = H5Pset_libver_bounds(access.get(), H5F_LIBVER_V18, H5F_LIBVER_V110) >= 0 &&
                   H5Pset_alignment(access.get(), kAlignFrom, File::kDirectUnit) >= 0 &&
                   H5Pset_meta_block_size(access.get(), kMetadataBlock) >= 0;
  TRY(checked_call(set ? 0 : -1, ErrorCode::kInternal, "HDF5 file"));
  *file_ =
      TRY(checked(H5Fcreate("memory", H5F_ACC_TRUNC, creation.get(), access.get()), ErrorCode::kInternal, "HDF5 file"));
  return write_text_attribute(file_->get(), "reshard_version", RESHARD_VERSION);
}

Result<Handle> Hdf5Target::create_dataset(const std::string& path, DType dtype, const Dims& shape,
                                          const Chunking* chunking) {
  const Handle type = TRY(type_of(dtype));
  const Handle creation = TRY(DatasetMaker::properties());
  H5Pset_fill_time(creation.get(), H5D_FILL_TIME_NEVER);
  if (chunking) {
    std::array<hsize_t, kMaxRank> chunk{};
    std::transform(chunking->shape.begin(), chunking->shape.end(), chunk.begin(),
                   [](Index n) { return static_cast<hsize_t>(n); });
    const auto zstd_level = static_cast<unsigned>(level());
    // Add the shuffle filter even if it does nothing, so that the filter masks of all chunks mean the same.
    const bool set = H5Pset_chunk(creation.get(), shape.rank(), chunk.data()) >= 0 &&
                     H5Pset_shuffle(creation.get()) >= 0 &&
                     H5Pset_filter(creation.get(), kZstdFilter, H5Z_FLAG_OPTIONAL, 1, &zstd_level) >= 0;
    TRY(checked_call(set ? 0 : -1, ErrorCode::kInternal, "dataset '" + printable(path) + "'"));
  } else {
    H5Pset_alloc_time(creation.get(), H5D_ALLOC_TIME_EARLY);
  }
  return datasets_->make(file_->get(), path, type.get(), shape, creation.get());
}

// Writes the attributes that record what a dataset's path cannot express.
Status Hdf5Target::describe(const Handle& dataset, const std::string& name, const std::string& path,
                            const KeyPath& key) {
  const std::string key_text = key.empty() || key == KeyPath{name} ? "" : key_path_text(key);
  if (name.size() > kMaxTextAttribute || key_text.size() > kMaxTextAttribute)
    return unsupported("'" + printable(name.substr(0, 100)) + "...': a name of " + count_of(std::ssize(name), "byte") +
                       "; HDF5 has room for " + with_commas(Index{kMaxTextAttribute}));
  if (name_of_path(path) != name) TRY(write_text_attribute(dataset.get(), kNameAttribute, name));
  if (!key_text.empty()) TRY(write_text_attribute(dataset.get(), kPathAttribute, key_text));
  return {};
}

Result<Index> Hdf5Target::address_of(const Handle& dataset, const std::string& name) {
  const haddr_t address = H5Dget_offset(dataset.get());
  if (address == HADDR_UNDEF || address > static_cast<haddr_t>(INT64_MAX))
    return internal_error("dataset '" + printable(name) + "': the library allocated no space for it");
  return address;
}

Status Hdf5Target::add_tensor(const TargetTensor& wanted, const std::string& path) {
  const auto elements = checked_volume(wanted.shape);
  if (!elements || !checked_mul(*elements, byte_size(wanted.dtype)))
    return unsupported(tensor_text(wanted.name) + ": 2^63 bytes or more");
  Tensor tensor;
  tensor.name = wanted.name;
  tensor.dtype = wanted.dtype;
  tensor.shape = wanted.shape;
  tensor.fragments = FragmentList(wanted.shape.rank());
  Item item;
  item.tensor = catalog_.tensors().size();
  // The library supports no chunks for scalars and for empty tensors.
  if (encoder() && wanted.shape.rank() > 0 && *elements > 0)
    item.chunking = chunking_of(wanted.shape, byte_size(wanted.dtype));
  item.dataset =
      TRY(create_dataset(path, wanted.dtype, wanted.shape, item.chunking ? &*item.chunking : nullptr).context([&] {
        return tensor_text(wanted.name);
      }));
  TRY(describe(item.dataset, wanted.name, path, wanted.path));
  if (needs_attribute(wanted.dtype))
    TRY(write_text_attribute(item.dataset.get(), kDTypeAttribute, info(wanted.dtype).torch_name));
  if (!item.chunking && *elements > 0) item.address = TRY(address_of(item.dataset, wanted.name));
  item.begin = encoder() ? catalog_.files[0].size : item.address;
  tensor.fragments.add(whole(wanted.shape), {0, item.begin, tensor.bytes()});
  if (encoder()) {
    const auto end = checked_add(item.begin, tensor.bytes());
    const auto next = end ? checked_round_up(*end, File::kDirectUnit) : std::nullopt;
    if (!next) return unsupported(tensor_text(wanted.name) + ": 2^63 bytes or more in all");
    catalog_.files[0].size = *next;
    if (!item.chunking) item.dataset = Handle();
    item.first_chunk = chunks_;
    if (item.chunking) chunks_ += tensor.bytes() / item.chunking->column_bytes * item.chunking->per_column;
    if (!item.chunking && *elements > 0) ++chunks_;
    items_->push_back(std::move(item));
  }
  return catalog_.add(std::move(tensor));
}

Status Hdf5Target::add_blob(const TargetBlob& blob, Index number) {
  const std::string path = std::string(kOwnGroup) + "/objects/" + std::to_string(number);
  const Handle dataset = TRY(create_dataset(path, DType::kUint8, {std::ssize(blob.bytes)}, nullptr));
  TRY(describe(dataset, blob.name, path, blob.path));
  blob_places_.push_back(blob.bytes.empty() ? 0 : TRY(address_of(dataset, blob.name)));
  return {};
}

Status Hdf5Target::lay_out() {
  const LibraryLock lock;
  catalog_.files = {{"archive.h5", 0}};
  TRY(create_file());
  std::vector<std::string_view> names;
  for (const TargetTensor& tensor : request_.tensors) names.push_back(tensor.name);
  PathMaker paths(names);
  for (const TargetTensor& tensor : request_.tensors) TRY(add_tensor(tensor, paths.path_of(tensor.name)));
  for (std::size_t i = 0; i < request_.blobs.size(); ++i) TRY(add_blob(request_.blobs[i], i));
  if (!encoder()) catalog_.files[0].size = image_->end;
  return {};
}

Status Hdf5Target::add_side_file(const std::string& name, std::string_view contents) {
  const LibraryLock lock;
  const std::string path = std::string(kOwnGroup) + "/files/" + name;
  const Handle dataset = TRY(create_dataset(path, DType::kUint8, {std::ssize(contents)}, nullptr));
  if (contents.empty()) return {};
  return checked_call(H5Dwrite(dataset.get(), H5T_NATIVE_UINT8, H5S_ALL, H5S_ALL, H5P_DEFAULT, contents.data()),
                      ErrorCode::kInternal, path);
}

// ---- encoding

Status Hdf5Target::encode(Index offset, Bytes bytes, const EmitChunk& emit) {
  auto item = std::upper_bound(items_->begin(), items_->end(), offset,
                               [](Index place, const Item& i) { return place < i.begin; });
  if (item == items_->begin()) return internal_error("bytes to encode at " + std::to_string(offset));
  --item;
  const Index begin = offset - item->begin, all = catalog_.tensors()[item->tensor].bytes();
  if (!fits_inside(begin, std::ssize(bytes), all))
    return internal_error("bytes to encode at " + std::to_string(offset) + " reach past their tensor");
  if (item->chunking) return encode_chunked(*item, begin, bytes, emit);
  if (std::ssize(bytes) != all) return internal_error("a part of a value at " + std::to_string(offset));
  return emit({item->first_chunk, all}, bytes);
}

Status Hdf5Target::encode_chunked(const Item& item, Index begin, Bytes bytes, const EmitChunk& emit) {
  const Chunking& c = *item.chunking;
  while (!bytes.empty()) {
    const Index column = begin / c.column_bytes, within = begin % c.column_bytes;
    const Index chunk = column * c.per_column + within / c.bytes, at = within % c.bytes;
    const Index length = std::min(c.bytes, c.column_bytes - (within - at));  // bytes of this chunk
    const Index n = std::min(length - at, std::ssize(bytes));
    const Bytes part = bytes.first(n);
    if (n == c.bytes) {
      TRY(store_chunk(item, chunk, part, emit));
    } else {
      const auto what = [&] { return tensor_text(catalog_.tensors()[item.tensor].name); };
      const auto done = TRY(assembler_.add({item.first_chunk + chunk, at, length, c.bytes}, part, what));
      if (!done.empty()) TRY(store_chunk(item, chunk, done, emit));
    }
    bytes = bytes.subspan(part.size());
    begin += n;
  }
  return {};
}

std::unique_ptr<ChunkEncoder> Hdf5Target::take_encoder() {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return std::make_unique<ChunkEncoder>(level(), kChunkBytes);
  auto encoder = std::move(idle_.back());
  idle_.pop_back();
  return encoder;
}

Status Hdf5Target::store_chunk(const Item& item, Index chunk, Bytes whole, const EmitChunk& emit) {
  const Index unit = request_.compression.shuffle ? byte_size(catalog_.tensors()[item.tensor].dtype) : 1;
  auto encoder = take_encoder();
  const Bytes frame = TRY(encoder->encode(whole, unit));
  const Bytes stored = frame.empty() ? whole : frame;
  const unsigned mask = frame.empty() ? kNothingApplied : request_.compression.shuffle ? 0u : 0b01u;
  TRY(emit({item.first_chunk + chunk, std::ssize(stored), mask}, stored));
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(encoder));
  return {};
}

// Registers a chunk with the library and returns the offset for its data. The library does not read the data it is
// given.
Result<Index> Hdf5Target::place(const EncodedChunk& chunk) {
  const auto item = std::prev(std::upper_bound(items_->begin(), items_->end(), chunk.number,
                                               [](Index number, const Item& i) { return number < i.first_chunk; }));
  if (!item->chunking) return item->address;
  const Tensor& tensor = catalog_.tensors()[item->tensor];
  const Dims origin = chunk_origin(*item->chunking, tensor.shape, chunk.number - item->first_chunk);
  std::array<hsize_t, kMaxRank> at{};
  for (int d = 0; d < origin.rank(); ++d) at[d] = static_cast<hsize_t>(origin[d]);
  const LibraryLock lock;
  unread_.resize(std::size_t{kChunkBytes});
  const std::size_t size = chunk.bytes;
  if (size > unread_.size()) return internal_error("chunk of " + tensor_text(tensor.name) + ": too long");
  image_->passes_payloads = true;
  image_->payload_at.reset();
  const herr_t written =
      H5Dwrite_chunk(item->dataset.get(), H5P_DEFAULT, chunk.filters, at.data(), size, unread_.data());
  image_->passes_payloads = false;
  TRY(checked_call(written, ErrorCode::kInternal, "chunk of '" + tensor.name + "'"));
  if (!image_->payload_at) return internal_error("the HDF5 library wrote no chunk");
  return *image_->payload_at;
}

Status Hdf5Target::seal(const PayloadCrc&, const EmitBytes& emit) const {
  const LibraryLock lock;
  if (const auto number = assembler_.incomplete())
    return internal_error("chunk " + std::to_string(*number) + " was not written completely");
  close();
  for (std::size_t i = 0; i < blob_places_.size(); ++i)
    if (!request_.blobs[i].bytes.empty()) TRY(emit(0, blob_places_[i], reshard::as_bytes(request_.blobs[i].bytes)));
  return image_->each_run([&](Index offset, Bytes bytes) { return emit(0, offset, bytes); });
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) {
  if (request.mesh.ranks() != 1)
    return unsupported("an HDF5 archive holds whole tensors: expected a mesh of one rank, got " +
                       request.mesh.to_string());
  TRY(rename_parameter_lists(request));
  auto target = std::make_unique<Hdf5Target>(std::move(request));
  TRY(target->lay_out());
  return std::unique_ptr<Target>(std::move(target));
}

}  // namespace reshard::hdf5
