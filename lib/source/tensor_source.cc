// SPDX-License-Identifier: Apache-2.0
#include "lib/source/tensor_source.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <set>
#include <span>
#include <utility>

#include "lib/base/text.h"
#include "lib/device/copy.h"
#include "lib/device/crc32.h"
#include "lib/source/piece_rows.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

// Returns the unit that a big-endian writer swapped: complex numbers have two parts.
Index swap_unit(DType dtype) {
  const bool complex = dtype == DType::kComplex32 || dtype == DType::kComplex64 || dtype == DType::kComplex128;
  return byte_size(dtype) / (complex ? 2 : 1);
}

std::string piece_text(const Tensor& tensor, const Piece& piece) {
  return tensor_text(tensor.name) + " " + to_string(piece.box);
}

}  // namespace

Index column_count(const FragmentList& fragments) {
  if (fragments.size() < 2) return 1;
  std::set<Dims> columns;
  for (std::size_t i = 0; i < fragments.size() && columns.size() < 64; ++i) {
    const Box box = fragments.box(i);
    if (box.rank() > 1 && !box.empty()) columns.insert(Dims(box.origin.span().subspan(1)));
  }
  return std::max<Index>(1, static_cast<Index>(columns.size()));
}

Error crc_mismatch(const Catalog& catalog, const Tensor& tensor, const Fragment& fragment, std::uint32_t got) {
  char text[64];
  std::snprintf(text, sizeof text, "expected CRC-32 %08x, got %08x", *fragment.crc, got);
  return corrupt(at(catalog.file_path(fragment.extent.file), fragment.extent.offset) + ": " + tensor_text(tensor.name) +
                 " " + to_string(fragment.box) + ": " + text + ": the bytes changed after they were saved");
}

FileSource::FileSource(const Catalog& catalog, FilePool& files)
    : catalog_(catalog),
      files_(files),
      crcs_([&catalog](const VisitExtent& visit) {
        for (const Tensor& t : catalog.tensors())
          for (std::size_t i = 0; t.fragments.has_crcs() && i < t.fragments.size(); ++i) visit(t.fragments.extent(i));
      }),
      indexes_(catalog.tensors().size()) {}

const FragmentIndex& FileSource::index(std::size_t tensor) {
  const std::lock_guard lock(index_mutex_);
  auto& slot = indexes_[tensor];
  if (!slot) slot = shared_indexes_.of(catalog_.tensors()[tensor].fragments);
  return *slot;
}

Index FileSource::columns(std::size_t tensor) const { return column_count(catalog_.tensors()[tensor].fragments); }

Index FileSource::checksums_checked() const { return checked_; }

Status FileSource::check_crc(const Tensor& tensor, const Fragment& f, std::uint32_t got) const {
  return got == *f.crc ? Status() : crc_mismatch(catalog_, tensor, f, got);
}

// Adds the bytes of a group to the CRC of its extent, and verifies the CRC once the extent is complete.
Status FileSource::add_crc(const Tensor& tensor, const Fragment& fragment, const PieceGroup& group, Bytes bytes) {
  // If runs are short, the bytes between them are read repeatedly.
  if (!fragment.crc || !crcs_.is_new(group.extent, group.begin, group.length())) return {};
  const auto whole = crcs_.add(group.extent, group.begin, group.length(), crc32(0, bytes));
  if (!whole) return {};
  TRY(check_crc(tensor, fragment, *whole));
  ++checked_;
  return {};
}

Index decoding_memory(const Catalog& catalog) {
  Index most = 0;
  for (const Tensor& tensor : catalog.tensors())
    for (std::size_t i = 0; tensor.fragments.has_encoded() && i < tensor.fragments.size(); ++i)
      if (const Fragment f = tensor.fragments.get(i); f.encoding)
        most = std::max(most, f.extent.length + 2 * f.encoding->decoded_bytes);
  return most;
}

std::unique_ptr<FileSource::Decoding> FileSource::take_decoding(const Extent& preferred) {
  const std::lock_guard lock(idle_mutex_);
  if (idle_.empty()) return std::make_unique<Decoding>();
  auto it = std::find_if(idle_.begin(), idle_.end(), [&](const auto& d) { return d->extent == preferred; });
  if (it == idle_.end()) it = idle_.end() - 1;
  auto out = std::move(*it);
  idle_.erase(it);
  return out;
}

void FileSource::give_back(std::unique_ptr<Decoding> decoding) {
  const std::lock_guard lock(idle_mutex_);
  idle_.push_back(std::move(decoding));
}

Status FileSource::decode(const Tensor& tensor, const Fragment& fragment, const File& file, Decoding& decoding) {
  if (!decoding.elements.empty() && decoding.extent == fragment.extent) return {};
  decoding.elements = {};
  decoding.extent = fragment.extent;
  const std::string what = tensor_text(tensor.name) + " " + to_string(fragment.box);
  const auto length = static_cast<std::size_t>(fragment.extent.length);
  if (decoding.stored.size() < length) decoding.stored.resize(length);
  const MutableBytes stored = MutableBytes(decoding.stored).first(length);
  TRY(file.read_at(fragment.extent.offset, stored).context(what));
  const MutableBytes elements =
      TRY(decoding.decoder.decode(stored, *fragment.encoding, at(file.path(), fragment.extent.offset) + ": " + what));
  if (fragment.big_endian) swap_bytes(elements, swap_unit(tensor.dtype));
  decoding.elements = elements;
  return {};
}

// Reads the pieces of a group in one encoded fragment.
Status FileSource::read_encoded(const Tensor& tensor, const PieceGroup& group, const Fragment& fragment,
                                const File& file, const Box& box, MutableBytes out) {
  const Index eb = byte_size(tensor.dtype);
  const Dims out_strides = row_major_strides(box.shape);
  auto decoding = take_decoding(fragment.extent);
  const Status decoded = decode(tensor, fragment, file, *decoding);
  if (decoded) {
    for (const Piece& p : group.pieces) {
      std::byte* to = out.data() + offset_in(box, out_strides, p.box) * eb;
      copy_box(p.box.shape, eb, decoding->elements.data() + p.begin, p.strides, to, out_strides);
    }
  }
  give_back(std::move(decoding));
  return decoded;
}

std::vector<StoredPiece> FileSource::pieces(std::size_t number, const Box& box) {
  const Tensor& tensor = catalog_.tensors()[number];
  return stored_pieces(tensor.fragments, index(number), box, byte_size(tensor.dtype));
}

Result<bool> FileSource::read_to_device(std::size_t number, const Box& box, Stream& stream, MutableBytes out) {
  if (!stream.reads_files()) return false;
  const Tensor& tensor = catalog_.tensors()[number];
  const Index eb = byte_size(tensor.dtype);
  const Dims out_strides = row_major_strides(box.shape);
  const auto groups = pieces_of(tensor.fragments, index(number), box, eb, static_cast<Index>(out.size()));
  const bool plain = std::all_of(groups.begin(), groups.end(), [&](const PieceGroup& group) {
    const Fragment fragment = tensor.fragments.get(group.pieces.front().fragment);
    return is_one_run(group, out_strides) && !fragment.encoding && !fragment.crc && !fragment.big_endian;
  });
  if (!plain) return false;
  for (const PieceGroup& group : groups) {
    const auto file = TRY(files_.open(catalog_.file_path(group.extent.file)));
    const Piece& piece = group.pieces.front();
    const MutableBytes to = out.subspan(static_cast<std::size_t>(offset_in(box, out_strides, piece.box) * eb),
                                        static_cast<std::size_t>(group.length()));
    const bool read =
        TRY(stream.read_file(file, group.extent.offset + group.begin, to).context(piece_text(tensor, piece)));
    if (!read) return false;
  }
  return true;
}

Result<Index> FileSource::read_as_stored(std::size_t number, const Box& box, const PieceFilter& wanted,
                                         MutableBytes out, std::vector<LaidPiece>& pieces) {
  const Tensor& tensor = catalog_.tensors()[number];
  const auto room = static_cast<Index>(out.size());
  const auto groups = pieces_of(tensor.fragments, index(number), box, byte_size(tensor.dtype), room, wanted);
  const auto place = [](const PieceGroup& group, Index used) {
    return DirectReader::place(group.extent.offset + group.begin, used);
  };
  Index used = 0;
  for (const PieceGroup& group : groups) {
    const Fragment fragment = tensor.fragments.get(group.pieces.front().fragment);
    used = place(group, used) + group.length();
    if (fragment.encoding || fragment.big_endian || DirectReader::end_of(used) > room) return Index{0};
  }
  used = 0;
  for (const PieceGroup& group : groups) {
    const Piece& first = group.pieces.front();
    const auto file = TRY(files_.open(catalog_.file_path(group.extent.file)));
    const Index at = place(group, used);
    TRY(direct_.read(file, group.extent.offset + group.begin, group.length(), out, at).context([&] {
      return piece_text(tensor, first);
    }));
    used = at + group.length();
    const Bytes bytes = out.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(group.length()));
    TRY(add_crc(tensor, tensor.fragments.get(first.fragment), group, bytes));
    for (const Piece& p : group.pieces) pieces.push_back({p.box, p.strides, at + p.begin - group.begin});
  }
  return used;
}

void FileSource::expect_once() {
  in_order_ = true;
  // Usually all files are on the file system of the first.
  once_ = !catalog_.files.empty() && DirectReader::pays_at(catalog_.file_path(0));
}

void FileSource::add_ranges(std::size_t number, const Box& box, Index scratch, std::vector<FileRange>& out) {
  const Tensor& tensor = catalog_.tensors()[number];
  for (const PieceGroup& group : pieces_of(tensor.fragments, index(number), box, byte_size(tensor.dtype), scratch)) {
    const bool is_whole = tensor.fragments.get(group.pieces.front().fragment).encoding != nullptr;
    const std::string path = catalog_.file_path(group.extent.file);
    out.push_back(is_whole ? FileRange{path, group.extent.offset, group.extent.length}
                           : FileRange{path, group.extent.offset + group.begin, group.length()});
  }
}

// Reads the bytes of a group into `bytes`, adds them to the CRC of its extent, and brings them into memory's byte
// order. `bytes` may be at DirectReader::place() in `scratch`, or outside the part of it that is passed.
Status FileSource::read_group(const Tensor& tensor, const Fragment& fragment, const PieceGroup& group,
                              const std::shared_ptr<const File>& file, MutableBytes bytes, MutableBytes scratch) {
  const Index offset = group.extent.offset + group.begin;
  const auto read = [&] {
    if (is_past_cache(tensor, group, *file)) return direct_.read_through(file, offset, bytes, scratch);
    if (!in_order_ || group.length() > ShortReads::kLongest || is_remote()) return file->read_at(offset, bytes);
    return short_.read(group.extent.file, *file, catalog_.files[group.extent.file].size, offset, bytes);
  };
  TRY(read().context([&] { return piece_text(tensor, group.pieces.front()); }));
  TRY(add_crc(tensor, fragment, group, bytes));
  if (fragment.big_endian) swap_bytes(bytes, swap_unit(tensor.dtype));
  return {};
}

bool FileSource::is_past_cache(const Tensor& tensor, const PieceGroup& group, const File& file) {
  return once_ && direct_.wants_direct(file, group.extent.offset + group.begin, group.length()) &&
         !has_gaps(group, byte_size(tensor.dtype));
}

Status FileSource::read_pieces(std::size_t number, const Box& box, const PieceFilter& wanted, MutableBytes out,
                               MutableBytes scratch) {
  const Tensor& tensor = catalog_.tensors()[number];
  const Index eb = byte_size(tensor.dtype);
  const Dims out_strides = row_major_strides(box.shape);
  const auto copy = [&](const Piece& p, const std::byte* from) {
    copy_box(p.box.shape, eb, from, p.strides, out.data() + offset_in(box, out_strides, p.box) * eb, out_strides);
  };
  // When the page cache is bypassed, whole units of the file are read around a group.
  const Index room = std::ssize(scratch) - (once_ ? 2 * File::kDirectUnit : 0);
  const std::vector<PieceGroup> groups = pieces_of(tensor.fragments, index(number), box, eb, room, wanted);
  std::size_t count = 1;
  for (std::size_t i = 0; i < groups.size(); i += std::exchange(count, 1)) {
    const PieceGroup& group = groups[i];
    const Piece& first = group.pieces.front();
    const auto file = TRY(files_.open(catalog_.file_path(group.extent.file)));
    const Fragment fragment = tensor.fragments.get(first.fragment);
    const auto length = static_cast<std::size_t>(group.length());
    if (fragment.encoding) {
      TRY(read_encoded(tensor, group, fragment, *file, box, out));
      continue;
    }
    // A piece that is contiguous on both sides needs no scratch memory.
    if (is_one_run(group, out_strides)) {
      const auto at = static_cast<std::size_t>(offset_in(box, out_strides, first.box) * eb);
      TRY(read_group(tensor, fragment, group, file, out.subspan(at, length), scratch));
      continue;
    }
    if (group.length() > room)
      return internal_error("scratch memory: expected at least " + bytes_of(length) + ", got " + std::to_string(room));
    // Elements that are transposed are copied many rows at a time: a copy of one row would touch a cache line for each.
    Piece rows = first;
    count = take_rows(std::span(groups).subspan(i), eb, room / 2, rows);
    if (count > 1) {
      const MutableBytes rest = scratch.subspan(count * length);
      for (std::size_t k = 0; k < count; ++k)
        TRY(read_group(tensor, fragment, groups[i + k], file, scratch.subspan(k * length, length), rest));
      copy(rows, scratch.data());
      continue;
    }
    const Index begin = group.extent.offset + group.begin;
    const auto at = static_cast<std::size_t>(is_past_cache(tensor, group, *file) ? DirectReader::place(begin, 0) : 0);
    TRY(read_group(tensor, fragment, group, file, scratch.subspan(at, length), scratch));
    for (const Piece& p : group.pieces) copy(p, scratch.data() + at + (p.begin - group.begin));
  }
  return {};
}

// Sends what the ranks have seen of extents that none of them read completely to rank 0. Returns the CRCs of those that
// are complete now.
Result<FileSource::ByPlace> FileSource::bring_together(Transport* ranks) {
  ByPlace whole;
  if (rank_count(ranks) == 1) return whole;
  // Any rank may have read again what earlier runs have seen, so everything is counted once, on rank 0.
  const bool is_continued = !continued_.empty();
  const Index counts[1] = {is_continued && ranks->rank() > 0 ? 0 : checked_.load()};
  TRY(stream_values<CrcPiece>(
      ranks, [&](const VisitPiece& visit) { is_continued ? crcs_.visit_all(visit) : crcs_.visit_incomplete(visit); },
      [&](const CrcPiece& p) {
        if (const auto crc = crcs_.add(p.extent, p.begin, p.length, p.crc))
          whole[{p.extent.file, p.extent.offset}] = *crc;
      }));
  const auto all_counts = TRY(gather_values<Index>(ranks, counts));
  if (ranks->rank() > 0) {
    crcs_.clear();
    checked_ = 0;
    return whole;
  }
  checked_ = std::accumulate(all_counts.begin(), all_counts.end(), Index{0});
  return whole;
}

void FileSource::keep_seen(const std::vector<CrcPiece>& seen, const std::vector<std::size_t>& tensors) {
  for (const CrcPiece& p : seen)
    if (const auto crc = crcs_.add(p.extent, p.begin, p.length, p.crc))
      seen_before_[{p.extent.file, p.extent.offset}] = *crc;
  continued_ = tensors;
  crcs_.keep_recent();
}

Status FileSource::finish(MutableBytes scratch, Transport* ranks) {
  // The extents to look at once more: with a CRC if the ranks together have read all of them, or without one if some
  // bytes were never needed or were only read again with others. Those bytes are read now. CRCs recorded by earlier
  // runs are checked against the source again.
  ByPlace rest = TRY(bring_together(ranks));
  if (rank_of(ranks) > 0) return {};
  rest.insert(seen_before_.begin(), seen_before_.end());
  for (const std::size_t number : continued_) {
    const FragmentList& fragments = catalog_.tensors()[number].fragments;
    for (std::size_t i = 0; i < fragments.size(); ++i)
      if (const Fragment f = fragments.get(i); f.crc && !f.encoding && f.extent.length > 0 && !crcs_.whole(f.extent))
        rest.emplace(std::pair(f.extent.file, f.extent.offset), std::nullopt);
  }
  for (const Extent& e : crcs_.incomplete()) rest.emplace(std::pair(e.file, e.offset), std::nullopt);
  if (rest.empty()) return {};
  for (const Tensor& tensor : catalog_.tensors()) {
    for (std::size_t i = 0; i < tensor.fragments.size(); ++i) {
      const Extent& extent = tensor.fragments.extent(i);
      const auto found = rest.find({extent.file, extent.offset});
      if (found == rest.end()) continue;
      if (!found->second) found->second = TRY(crc_of(extent, scratch));
      TRY(check_crc(tensor, tensor.fragments.get(i), *found->second));
      rest.erase(found);
      ++checked_;
    }
  }
  return {};
}

Result<std::uint32_t> FileSource::crc_of(const Extent& extent, MutableBytes scratch) {
  const auto file = TRY(files_.open(catalog_.file_path(extent.file)));
  std::optional<std::uint32_t> whole = crcs_.whole(extent);
  for (const auto& [begin, end] : crcs_.gaps(extent))
    for (Index at = begin; at < end;) {
      const MutableBytes part = scratch.first(std::min(scratch.size(), static_cast<std::size_t>(end - at)));
      TRY(file->read_at(extent.offset + at, part));
      whole = crcs_.add(extent, at, std::ssize(part), crc32(0, part));
      at += std::ssize(part);
    }
  return whole.value_or(0);  // 0 for an empty extent
}

}  // namespace reshard
