// SPDX-License-Identifier: Apache-2.0
#include "lib/image/image.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "lib/base/memory_limit.h"
#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/device/copy.h"
#include "lib/device/crc32.h"

namespace reshard {
namespace {

constexpr Index kBesideSlabs = Index{12} << 20;  // code, stacks, and allocator overhead
constexpr Index kSlabStep = Index{64} << 10;
constexpr Index kFreeBetween = 12;  // one part in this many stays free in the allocator, between slabs of many sizes
constexpr Index kLeastSlabs = 5;    // in the cache

// Returns the bytes that two extents of one file share; empty if they do not overlap.
Extent shared_bytes(const Extent& a, const Extent& b) {
  const Index begin = std::max(a.offset, b.offset), end = std::min(a.offset + a.length, b.offset + b.length);
  return {a.file, begin, std::max<Index>(0, end - begin)};
}

// Copies the part of `bytes`, at `offset` of the file, that is inside `place` to `out`, the buffer for `place`.
void put(const Extent& place, MutableBytes out, Index offset, Bytes bytes) {
  const Extent common = shared_bytes(place, {place.file, offset, std::ssize(bytes)});
  if (common.length == 0) return;
  std::memcpy(out.data() + (common.offset - place.offset), bytes.data() + (common.offset - offset), common.length);
}

}  // namespace

// A set of buffers, held by one thread while it fills a slab.
class Image::Lease {
 public:
  explicit Lease(Image& image) : image_(image) {
    std::unique_lock lock(image_.idle_mutex_);
    image_.given_back_.wait(lock, [&] { return !image_.idle_.empty(); });
    buffers_ = image_.idle_.back();
    image_.idle_.pop_back();
  }
  ~Lease() {
    const std::lock_guard lock(image_.idle_mutex_);
    image_.idle_.push_back(buffers_);
    image_.given_back_.notify_one();
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  const Buffers& operator*() const { return *buffers_; }

 private:
  Image& image_;
  const Buffers* buffers_ = nullptr;
};

Result<std::vector<Image::FileEntry>> Image::files_of(const Target& target) {
  if (target.encoder())
    return unsupported("a compressed output cannot be read before it is written; drop the compression");
  std::vector<FileEntry> files;
  for (std::uint32_t f = 0; f < target.catalog().files.size(); ++f)
    files.push_back({target.catalog().files[f].path, target.sealed_size(f)});
  return files;
}

Result<std::unique_ptr<Image>> Image::create(const Inputs& of, const RunOptions& run, Index reserved) {
  std::unique_ptr<Image> image(new Image(of, run));
  image->files_ = TRY(files_of(of.target));
  TRY(image->find_stretches());
  TRY(image->make_buffers(reserved));  // from the memory that is left
  for (std::vector<Stretch>& there : image->stretches_)
    for (Stretch& stretch : there) stretch.slab = image->slab_of(stretch.first, stretch.first + stretch.count);
  return image;
}

Status Image::make_buffers(Index reserved) {
  Device& device = device_of(run_);
  const Catalog& source = of_.source.catalog();
  const bool converts = std::any_of(of_.plan.tensors.begin(), of_.plan.tensors.end(), [&](const PlannedTensor& p) {
    return source.tensors()[p.from].dtype != of_.target_view.tensors()[p.to].dtype;
  });
  const int threads = worker_count(run_);
  release_freed_memory();
  const Index crcs = of_.target.wants_crcs() ? std::ssize(uses_) * CrcLedger::kExtentBytes : 0;
  const Index fixed =
      held_bytes() + kBesideSlabs + reserved + crcs + threads * (run_.worker_bytes + decoding_memory(source));
  // Elements as stored, elements as converted, scratch memory, and the slab.
  const Index of_threads = Index{threads} * (converts ? 4 : 3);
  const Index least = fixed + (of_threads + kLeastSlabs) * kMinSlab;
  if (run_.memory < least)
    return usage_error("--memory " + human_bytes(run_.memory) + " is too small; expected at least " +
                       human_bytes(least) + " on " + count_of(threads, "thread"));
  const Index room = run_.memory - fixed;
  const Index wished = room / 2 / (of_threads + kLeastSlabs) / kSlabStep * kSlabStep;
  const Index slab = std::clamp(wished, kMinSlab, std::max(kMinSlab, device.slab_bytes()));
  memory_ = std::make_unique<ThreadBuffers>(TRY(ThreadBuffers::make(device, threads, slab, converts ? 1 : 0, slab)));
  for (const Buffers& b : memory_->buffers()) idle_.push_back(&b);
  slab_bytes_ = slab;
  const Index held = room - of_threads * slab;
  cache_ = std::make_unique<SlabCache>(held - held / kFreeBetween);
  return {};
}

Status Image::find_stretches() {
  for (std::size_t k = 0; k < of_.plan.tensors.size(); ++k) {
    const Tensor& to = of_.target_view.tensors()[of_.plan.tensors[k].to];
    for (const bool replica : {false, true}) {
      const FragmentList& list = replica ? to.replicas : to.fragments;
      for (std::size_t i = 0; i < list.size(); ++i)
        if (const Extent& e = list.extent(i); e.length > 0)
          uses_.push_back({e, static_cast<std::uint32_t>(k), static_cast<std::uint32_t>(i), replica});
    }
  }
  std::stable_sort(uses_.begin(), uses_.end(), [](const FragmentUse& a, const FragmentUse& b) {
    return std::pair(a.extent.file, a.extent.offset) < std::pair(b.extent.file, b.extent.offset);
  });
  stretches_.resize(files_.size());
  for (std::size_t i = 0; i < uses_.size();) {
    const Extent& e = uses_[i].extent;
    std::size_t end = i + 1;
    while (end < uses_.size() && uses_[end].extent == e) ++end;
    std::vector<Stretch>& there = stretches_[e.file];
    if (!there.empty() && there.back().end() > e.offset)
      return internal_error(at(files_[e.file].path, e.offset) + ": tensors overlap");
    there.push_back({.offset = e.offset, .length = e.length, .first = i, .count = end - i});
    i = end;
  }
  return {};
}

// Whole row groups if they are small enough, otherwise whole rows of the widest dimension that is, otherwise elements.
Index Image::slab_of(std::size_t first, std::size_t end) const {
  Index unit = 1, widest = 1;
  for (std::size_t i = first; i < end; ++i) {
    const Tensor &source = from(uses_[i]), &target = to(uses_[i]);
    const Index eb = byte_size(target.dtype);
    widest = std::max(widest, ceil_div(byte_size(source.dtype), eb));
    const Index limit = slab_bytes_ / widest;
    unit = std::max(unit, eb);
    const Fragment f = fragments_of(uses_[i]).get(uses_[i].fragment);
    for (int d = 0; d < f.box.rank(); ++d) {
      const Index step = f.strides[d] * eb, group = step * std::max(source.row_group, target.row_group);
      for (const Index candidate : {step, d == 0 ? group : step})
        if (candidate > unit && candidate <= limit && candidate % unit == 0) unit = candidate;
    }
  }
  return std::max<Index>(1, slab_bytes_ / widest / unit) * unit;
}

const FragmentList& Image::fragments_of(const FragmentUse& use) const {
  return use.replica ? to(use).replicas : to(use).fragments;
}

std::uint32_t Image::add_file(std::string path, Index size) {
  files_.push_back({std::move(path), size});
  return static_cast<std::uint32_t>(files_.size() - 1);
}

void Image::add_text(const Extent& place, std::function<Result<std::string>()> make) {
  texts_.push_back({place, std::move(make)});
}

// Returns the first stretch that ends after `offset`, or null.
const Image::Stretch* Image::stretch_after(std::uint32_t file, Index offset) const {
  if (file >= stretches_.size()) return nullptr;
  const std::vector<Stretch>& there = stretches_[file];
  const auto found = std::upper_bound(there.begin(), there.end(), offset,
                                      [](Index place, const Stretch& s) { return place < s.end(); });
  return found == there.end() ? nullptr : &*found;
}

Result<std::vector<Image::Part>> Image::read(std::uint32_t file, Index offset, Index length) {
  std::vector<Part> parts;
  const Index end = std::min(files_[file].size, offset + length);
  while (offset < end) {
    const Stretch* const stretch = stretch_after(file, offset);
    const auto add = [&](Slab slab, Index begin) {
      const Bytes all = std::as_const(*slab).bytes();
      const Index from = offset - begin, n = std::min(std::ssize(all) - from, end - offset);
      parts.push_back({std::move(slab), all.subspan(from, n)});
      offset += n;
    };
    if (stretch && stretch->offset <= offset) {
      const Index k = (offset - stretch->offset) / stretch->slab, begin = stretch->offset + k * stretch->slab;
      const Index before = offset;
      add(TRY(slab_at(file, *stretch, k)), begin);
      cache_->give({file, begin}, offset - before);
    } else {
      const Index until = stretch ? std::min(end, stretch->offset) : end;
      add(TRY(around({file, offset, until - offset}).context(at(files_[file].path, offset))), offset);
    }
  }
  return parts;
}

Status Image::read(std::uint32_t file, Index offset, MutableBytes out) {
  for (const Part& part : TRY(read(file, offset, std::ssize(out)))) {
    std::memcpy(out.data(), part.bytes.data(), part.bytes.size());
    out = out.subspan(part.bytes.size());
  }
  return {};
}

void Image::prove(const std::function<bool(std::uint32_t file, Index offset)>& counts) {
  proving_ = std::make_unique<Proving>();
  proving_->proofs.resize(of_.plan.tensors.size());
  std::vector<bool>& seen = proving_->seen;  // what does not count was seen elsewhere
  for (std::uint32_t file = 0; file < stretches_.size(); ++file)
    for (Stretch& stretch : stretches_[file]) {
      stretch.first_slab = std::ssize(seen);
      for (Index begin = 0; begin < stretch.length; begin += stretch.slab)
        seen.push_back(counts && !counts(file, stretch.offset + begin));
    }
  proving_->left = std::count(seen.begin(), seen.end(), false);
}

Status Image::read_rest() {
  const auto is_seen = [&](Index slab) {
    const std::lock_guard lock(proving_->mutex);
    return proving_->left == 0 || proving_->seen[slab];
  };
  for (std::uint32_t file = 0; file < stretches_.size(); ++file)
    for (const Stretch& stretch : stretches_[file])
      for (Index k = 0; k < ceil_div(stretch.length, stretch.slab); ++k)
        if (!is_seen(stretch.first_slab + k)) TRY(slab_at(file, stretch, k));
  return {};
}

std::optional<std::vector<TensorProof>> Image::proofs() const {
  const std::lock_guard lock(proving_->mutex);
  if (proving_->left > 0) return std::nullopt;
  return proving_->proofs;
}

bool Image::has_read_twice() const {
  const std::lock_guard lock(proving_->mutex);
  return proving_->read_twice;
}

void Image::add_ranges(std::uint32_t file, Index offset, Index length, std::vector<FileRange>& out) {
  if (!of_.source.is_remote() || file >= stretches_.size()) return;
  const Index end = offset + length, scratch = std::ssize(memory_->buffers().front().scratch);
  for (const Stretch* s = stretch_after(file, offset); s && s != stretches_[file].data() + stretches_[file].size();
       ++s) {
    if (s->offset >= end) return;
    const Index first = ceil_div(std::max<Index>(0, offset - s->offset), s->slab) * s->slab;
    const Index last = std::min(s->length, ceil_div(end - s->offset, s->slab) * s->slab);
    for (std::size_t i = s->first; i < s->first + s->count && first < last; ++i)
      for (const Piece& piece :
           pieces_between(fragments_of(uses_[i]), uses_[i].fragment, byte_size(to(uses_[i]).dtype), first, last))
        of_.source.add_ranges(of_.plan.tensors[uses_[i].planned].from, piece.box, scratch, out);
  }
}

Image::Needs Image::needs(std::uint32_t file, Index offset, Index length) const {
  for (const Text& text : texts_)
    if (text.place.file == file && shared_bytes(text.place, {file, offset, length}).length > 0) return Needs::kProofs;
  const Stretch* const stretch = stretch_after(file, offset);
  const bool is_inside = stretch && stretch->offset <= offset && offset + length <= stretch->end();
  return is_inside ? Needs::kNothing : Needs::kChecksums;
}

Result<Slab> Image::slab_at(std::uint32_t file, const Stretch& stretch, Index k) {
  const Index begin = k * stretch.slab, end = std::min(begin + stretch.slab, stretch.length);
  const SlabCache::Key key{file, stretch.offset + begin};
  return cache_->get(key, [&]() -> Result<Slab> {
    if (const auto error = damaged(key)) return *error;
    Result<Slab> slab = fill(file, stretch, begin, end).context(at(files_[file].path, key.second));
    if (!slab && slab.error().code() == ErrorCode::kCorrupt) {
      const std::lock_guard lock(damaged_mutex_);
      damaged_.emplace(key, slab.error());
    }
    return slab;
  });
}

std::optional<Error> Image::damaged(const SlabCache::Key& key) {
  const std::lock_guard lock(damaged_mutex_);
  const auto found = damaged_.find(key);
  return found == damaged_.end() ? std::nullopt : std::optional(found->second);
}

// Computes bytes [begin, end) of a stretch.
Result<Slab> Image::fill(std::uint32_t file, const Stretch& stretch, Index begin, Index end) {
  TRY(check_not_interrupted(run_));
  const auto slab = std::make_shared<SlabBytes>(end - begin, stretch.offset + begin);
  std::vector<std::pair<const FragmentUse*, Piece>> pieces;
  Index filled = 0;
  for (std::size_t i = stretch.first; i < stretch.first + stretch.count; ++i) {
    const FragmentUse& use = uses_[i];
    const Index eb = byte_size(to(use).dtype);
    for (Piece& piece : pieces_between(fragments_of(use), use.fragment, eb, begin, end)) {
      filled += volume(piece.box) * eb;
      pieces.emplace_back(&use, piece);
    }
  }
  if (filled != end - begin) std::memset(slab->bytes().data(), 0, slab->bytes().size());
  const std::size_t number = stretch.first_slab + begin / stretch.slab;
  Digests digests;
  const bool is_new = proving_ && [&] {
    const std::lock_guard lock(proving_->mutex);
    proving_->read_twice = proving_->read_twice || proving_->seen[number];
    return !proving_->seen[number];
  }();
  {
    const Lease buffers(*this);
    for (const auto& [use, piece] : pieces)
      TRY(fill_piece(*use, piece, begin, slab->bytes(), *buffers, is_new && !use->replica ? &digests : nullptr));
  }
  if (is_new) {
    const std::lock_guard lock(proving_->mutex);
    for (const auto& [planned, proof] : digests) {
      proving_->proofs[planned].source += proof.source;
      proving_->proofs[planned].target += proof.target;
    }
    proving_->seen[number] = true;
    --proving_->left;
  }
  if (of_.target.wants_crcs())
    crcs_.add({file, stretch.offset, stretch.length}, begin, end - begin, crc32(0, slab->bytes()));
  return Slab(slab);
}

// `out` is for the bytes from `begin` of the piece's extent.
Status Image::fill_piece(const FragmentUse& use, const Piece& piece, Index begin, MutableBytes out, const Buffers& b,
                         Digests* digests) {
  const Tensor &source = from(use), &target = to(use);
  const Index eb = byte_size(target.dtype), n = volume(piece.box);
  const std::size_t number = of_.plan.tensors[use.planned].from;
  if (piece.begin < begin || piece.end > begin + std::ssize(out))
    return internal_error(tensor_text(target.name) + " " + to_string(piece.box) + ": an element is in two slabs");
  const MutableBytes place = out.subspan(piece.begin - begin, piece.end - piece.begin);
  if (device_of(run_).is_cpu() && source.dtype == target.dtype && is_one_run(piece.box.shape, piece.strides)) {
    TRY(of_.source.read(number, piece.box, place, b.scratch));
    if (digests) TRY(digest(use, piece.box, place.data(), place.data(), *b.stream, *digests));
  } else {
    const Side side = TRY(read_box(of_.source, number, piece.box, b.slab, b));
    const DeviceBuffer elements = TRY(convert_on_device(b.slab, side, source.dtype, target.dtype, n, b));
    if (source.dtype != target.dtype || side == Side::kDevice) TRY(b.stream->download(elements, n * eb));
    TRY(b.stream->wait());
    if (digests) TRY(digest(use, piece.box, b.slab.device.data(), elements.device.data(), *b.stream, *digests));
    copy_box(piece.box.shape, eb, elements.host.data(), row_major_strides(piece.box.shape), place.data(),
             piece.strides);
  }
  std::set<std::uint32_t> files;
  for (const StoredPiece& stored : of_.source.pieces(number, piece.box)) files.insert(stored.file);
  for (const std::uint32_t f : files) TRY(of_.watched.check(f).context(tensor_text(source.name)));
  return {};
}

// Adds the digests of a piece's row-major elements before and after the conversion.
Status Image::digest(const FragmentUse& use, const Box& box, const std::byte* before, const std::byte* after,
                     Stream& stream, Digests& out) const {
  const Tensor &source = from(use), &target = to(use);
  TensorProof proof;
  TRY(stream.digest_box(source.shape, box, byte_size(source.dtype), before, &proof.source));
  if (source.dtype != target.dtype)
    TRY(stream.digest_box(source.shape, box, byte_size(target.dtype), after, &proof.target));
  TRY(stream.wait());
  if (source.dtype == target.dtype) proof.target = proof.source;
  out.emplace_back(use.planned, proof);
  return {};
}

// Computes bytes between stretches.
Result<Slab> Image::around(const Extent& place) {
  const auto slab = std::make_shared<SlabBytes>(place.length, place.offset);
  const MutableBytes out = slab->bytes();
  std::memset(out.data(), 0, out.size());
  if (place.file < of_.target.catalog().files.size()) {
    Status crcs;
    const PayloadCrc crc = [&](const Extent& e) -> std::uint32_t {
      if (e.length == 0 || !crcs) return 0;
      const auto sum = crc_of(e);
      if (!sum) crcs = sum.error();
      return sum ? *sum : 0;
    };
    TRY(of_.target.seal_at(place, crc, [&](std::uint32_t file, Index offset, Bytes bytes) -> Status {
      if (file == place.file) put(place, out, offset, bytes);
      return {};
    }));
    TRY(std::move(crcs));
  }
  for (const Text& text : texts_)
    if (text.place.file == place.file && shared_bytes(text.place, place).length > 0) TRY(overlay(text, place, out));
  return Slab(slab);
}

Status Image::overlay(const Text& text, const Extent& place, MutableBytes out) {
  const Slab whole = TRY(cache_->get({text.place.file, text.place.offset}, [&]() -> Result<Slab> {
    const std::string made = TRY(text.make());
    if (std::ssize(made) != text.place.length)
      return io_error("expected " + count_of(text.place.length, "byte") + ", got " + with_commas(std::ssize(made)));
    const auto slab = std::make_shared<SlabBytes>(text.place.length);
    put(text.place, slab->bytes(), text.place.offset, as_bytes(made));
    return Slab(slab);
  }));
  put(place, out, text.place.offset, whole->bytes());
  return {};
}

// Returns the CRC-32 of a stretch. Slabs that were already seen count; only the others are computed for it.
Result<std::uint32_t> Image::crc_of(const Extent& extent) {
  if (const auto known = crcs_.whole(extent)) return *known;
  const Stretch* const stretch = stretch_after(extent.file, extent.offset);
  if (!stretch || stretch->offset != extent.offset || stretch->length != extent.length)
    return internal_error(at(files_[extent.file].path, extent.offset) + ": no tensor is stored here");
  const Index slabs = ceil_div(extent.length, stretch->slab);
  TRY(parallel_for(slabs, worker_count(run_), [&](int, Index k) -> Status {
    const Index begin = k * stretch->slab;
    if (!crcs_.is_new(extent, begin, std::min(stretch->slab, extent.length - begin))) return {};
    const Slab slab = TRY(slab_at(extent.file, *stretch, k));
    const Bytes bytes = slab->bytes();
    crcs_.add(extent, begin, std::ssize(bytes), crc32(0, bytes));
    return {};
  }));
  if (const auto known = crcs_.whole(extent)) return *known;
  return internal_error(at(files_[extent.file].path, extent.offset) + ": the tensor was not read completely");
}

}  // namespace reshard
