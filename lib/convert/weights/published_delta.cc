// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/published_delta.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <utility>
#include <variant>

#include "lib/base/blake3.h"
#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/base/xor_bytes.h"
#include "lib/base/xxh3.h"
#include "lib/checkpoint/side_files.h"
#include "lib/source/tensor_source.h"

namespace reshard {
namespace {

constexpr std::string_view kEncoding = "delta_encoding";
constexpr std::string_view kXor = "xor", kOverwrite = "overwrite";
constexpr std::string_view kXxh3 = "xxh3-128", kAdler = "adler32", kBlake3 = "blake3";
constexpr Index kHeadBytes = sizeof(std::uint32_t);                       // of an overwriting change: its count
constexpr Index kEntryBytes = sizeof(std::uint32_t) + sizeof(std::byte);  // a position and a new byte

std::string attribute(const Catalog& catalog, std::string_view key) {
  for (const auto& [name, value] : catalog.attributes)
    if (name == key) return value;
  return {};
}

class Adler32 {
 public:
  void update(Bytes bytes) { sum_ = ::adler32_z(sum_, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()); }
  std::string hex() const {
    std::array<char, 17> text;
    std::snprintf(text.data(), text.size(), "%08lx", sum_);
    return text.data();
  }

 private:
  uLong sum_ = 1;
};

// A checksum in one of the formats that a delta may name.
class Checksum {
 public:
  explicit Checksum(const std::string& format) {
    if (format == kAdler) sum_ = Adler32();
    if (format == kBlake3) sum_ = Blake3();
  }
  void update(Bytes bytes) {
    std::visit([&](auto& sum) { sum.update(bytes); }, sum_);
  }
  std::string hex() const {
    return std::visit([](const auto& sum) { return sum.hex(); }, sum_);
  }

 private:
  std::variant<Xxh3, Adler32, Blake3> sum_;
};

// Calls visit(box) with boxes of at most a few MiB that follow one another in row-major order, unless a row is larger.
template <class Visit>
Status for_rows(const Tensor& tensor, const Visit& visit) {
  constexpr Index kBytes = Index{4} << 20;
  if (tensor.elements() == 0) return {};
  Box box = whole(tensor.shape);
  if (tensor.shape.rank() == 0) return visit(box);
  const Index all = tensor.shape[0], rows = std::max<Index>(1, kBytes / std::max<Index>(1, tensor.bytes() / all));
  for (Index begin = 0; begin < all; begin += rows) {
    box.origin[0] = begin;
    box.shape[0] = std::min(rows, all - begin);
    TRY(visit(box));
  }
  return {};
}

// Reads boxes of tensors as they are after some deltas: the exclusive or of the base and all of them. Not thread-safe.
class SumReader {
 public:
  using Sources = std::vector<std::unique_ptr<FileSource>>;
  explicit SumReader(const Sources& sources) : sources_(sources) {}

  // Returns the bytes of a box of the base's tensor after the first `count` sources, valid until the next call.
  Result<MutableBytes> read(const Tensor& tensor, const Box& box, std::size_t count) {
    sum_.resize(static_cast<std::size_t>(volume(box) * byte_size(tensor.dtype)));
    next_.resize(sum_.size());
    for (std::size_t s = 0; s < count; ++s) {
      const auto at = sources_[s]->catalog().find(tensor.name);
      if (!at)
        return unsupported(sources_[s]->catalog().where() + ": lacks " + tensor_text(tensor.name) +
                           ", which a published delta changes: make it from models with these names");
      TRY(sources_[s]->read(*at, box, s == 0 ? sum_ : next_, scratch_));
      if (s > 0) xor_into(sum_, next_);
    }
    return MutableBytes(sum_);
  }

 private:
  static constexpr std::size_t kScratch = std::size_t{1} << 20;
  const Sources& sources_;
  std::vector<std::byte> sum_, next_, scratch_ = std::vector<std::byte>(kScratch);
};

SumReader::Sources sources_of(std::span<Reader* const> readers) {
  SumReader::Sources out;
  for (Reader* reader : readers) out.push_back(std::make_unique<FileSource>(reader->catalog(), reader->files()));
  return out;
}

// Reads the positions and new bytes of a change with the encoding `overwrite`, in order and a stretch at a time.
class Overwrites {
 public:
  // `at`: the change's bytes in `file`, a count and then `count` entries.
  Overwrites(const File& file, Index at, Index count)
      : file_(file), positions_at_(at + kHeadBytes), bytes_at_(at + kHeadBytes + count * Index{4}), count_(count) {}

  // Returns the next position, or -1 at the end.
  Result<Index> position() {
    if (next_ == count_) return Index{-1};
    if (next_ == end_) TRY(fill());
    return Index{positions_[static_cast<std::size_t>(next_ - begin_)]};
  }
  // Returns the new byte at position(), and advances to the next position.
  std::byte take() { return bytes_[static_cast<std::size_t>(next_++ - begin_)]; }

 private:
  Status fill() {
    constexpr Index kEntries = Index{1} << 16;
    begin_ = next_;
    end_ = std::min(count_, begin_ + kEntries);
    positions_.resize(static_cast<std::size_t>(end_ - begin_));
    bytes_.resize(positions_.size());
    TRY(file_.read_at(positions_at_ + begin_ * Index{4}, std::as_writable_bytes(std::span(positions_))));
    return file_.read_at(bytes_at_ + begin_, bytes_);
  }

  const File& file_;
  const Index positions_at_, bytes_at_, count_;
  Index begin_ = 0, end_ = 0, next_ = 0;  // entries: of those in memory, and the next one
  std::vector<std::uint32_t> positions_;
  std::vector<std::byte> bytes_;
};

}  // namespace

bool PublishedDelta::is_one(const Catalog& catalog) {
  return !catalog.delta_of.empty() && !attribute(catalog, kEncoding).empty();
}

PublishedDelta::PublishedDelta(std::unique_ptr<Reader> stored, std::vector<Reader*> before)
    : stored_(std::move(stored)), before_(std::move(before)), base_(*before_.front()) {
  files_ = stored_->files();
  catalog_ = stored_->catalog().without_tensors();
  catalog_.parts = base_.catalog().parts;
  catalog_.has_model_names = base_.catalog().has_model_names;
  catalog_.vocabulary = base_.catalog().vocabulary;
  catalog_.header_metadata = base_.catalog().header_metadata;
  catalog_.shares_extents = true;  // of the zeros
}

Result<std::unique_ptr<Reader>> PublishedDelta::open(std::unique_ptr<Reader> stored, std::vector<Reader*> before) {
  std::unique_ptr<PublishedDelta> out(new PublishedDelta(std::move(stored), std::move(before)));
  TRY(out->read_facts().context(out->catalog_.root));
  TRY(out->take_tensors());
  return std::unique_ptr<Reader>(std::move(out));
}

Status PublishedDelta::read_facts() {
  const Catalog& stored = stored_->catalog();
  version_ = attribute(stored, "version");
  base_version_ = attribute(stored, "base_version");
  checksum_format_ = attribute(stored, "checksum_format");
  const std::string encoding = attribute(stored, kEncoding), compression = attribute(stored, "compression_format");
  const auto refused = [](const std::string& key, const std::string& got, const std::string& expected,
                          const std::string& advice) {
    return unsupported(key + ": expected " + expected + ", got '" + printable(got) + "'; " + advice);
  };
  overwrites_ = encoding == kOverwrite;
  if (!overwrites_ && encoding != kXor)
    return refused("delta_encoding", encoding, "xor or overwrite",
                   "publish it with --update-weight-delta-encoding xor (slime, miles)");
  if (compression != "zstd") return refused("compression_format", compression, "zstd", "publish it with zstd");
  if (checksum_format_ != kXxh3 && checksum_format_ != kAdler && checksum_format_ != kBlake3)
    return refused("checksum_format", checksum_format_, "xxh3-128, blake3 or adler32",
                   "publish it with --update-weight-delta-checksum xxh3-128 (slime, miles)");
  for (const auto& [key, value] : stored.header_metadata) checksums_[key] = value;
  return {};
}

Status PublishedDelta::take_tensors() {
  const Catalog &stored = stored_->catalog(), &model = base_.catalog();
  for (const Tensor& change : stored.tensors()) {
    const auto number = model.find(change.name);
    const std::string what = stored.where() + ": changes " + tensor_text(change.name);
    if (!number)
      return unsupported(what + ", which " + model.root +
                         " lacks: apply it to the Hugging Face model that it was made from");
    TRY(check_size(change, model.tensors()[*number]));
    if (!checksums_.contains(change.name)) return corrupt(what + ", but has no checksum of it");
  }
  TRY(catalog_.reserve(model.tensors().size()));
  for (const Tensor& old : model.tensors()) {
    Tensor tensor = old;
    const auto change = stored.find(old.name);
    const Extent extent = change ? stored.tensors()[*change].fragments.extent(0) : Extent{0, 0, old.bytes()};
    tensor.located = false;
    tensor.fragments = tensor.replicas = FragmentList(old.shape.rank());
    if (old.elements() > 0) tensor.fragments.add(dense_fragment(whole(old.shape), extent));
    TRY(catalog_.add(std::move(tensor)));
  }
  return {};
}

Status PublishedDelta::check_size(const Tensor& change, const Tensor& old) const {
  const std::string what = stored_->catalog().where() + ": changes " + tensor_text(change.name);
  const std::string other = ": it is not the model that it was made from";
  const Index bytes = change.bytes(), count = (bytes - kHeadBytes) / kEntryBytes;
  if (!overwrites_ && old.bytes() != bytes)
    return unsupported(what + " of " + count_of(bytes, "byte") + "; " + base_.catalog().root + " has " +
                       with_commas(old.bytes()) + other);
  if (!overwrites_) return {};
  if (bytes != kHeadBytes + count * kEntryBytes)
    return corrupt(what + ": expected a count, positions and bytes, got " + count_of(bytes, "byte"));
  if (count > old.bytes())
    return unsupported(what + " in " + count_of(count, "byte") + "; " + base_.catalog().root + " has " +
                       with_commas(old.bytes()) + other);
  if (old.bytes() - 1 > Index{std::numeric_limits<std::uint32_t>::max()})
    return unsupported(what + " of " + count_of(old.bytes(), "byte") +
                       ", but positions of 32 bits end at 4 GiB; publish it with --update-weight-delta-encoding xor");
  return {};
}

std::string PublishedDelta::checksum(const std::string& tensor) const {
  const auto found = stored_->catalog().find(tensor) ? checksums_.find(tensor) : checksums_.end();
  return found == checksums_.end() ? std::string() : found->second;
}

Result<std::uint32_t> PublishedDelta::add_file(const std::string& name, const std::string& spool, Index bytes) {
  const auto number = static_cast<std::uint32_t>(catalog_.files.size());
  catalog_.files.push_back({name, bytes});
  const std::string path = catalog_.file_path(number);
  if (added_.insert(name).second) files_.pin(path, TRY(File::create_anonymous(spool)));
  if (const auto file = TRY(files_.open(path)); TRY(file->size()) < bytes) TRY(file->set_length(bytes));
  return number;
}

Status PublishedDelta::locate_before(const std::string& tensor, int threads, const std::string& spool) const {
  for (Reader* reader : before_)
    if (const auto at = reader->catalog().find(tensor); at && !reader->catalog().tensors()[*at].located)
      TRY(reader->locate({*at}, threads, spool));
  return {};
}

Status PublishedDelta::write_difference(const Tensor& old, const Tensor& change, const File& to, Index offset) {
  const Extent extent = change.fragments.extent(0);
  const auto stored = TRY(stored_->files().open(stored_->catalog().file_path(extent.file)));
  const std::string what = stored_->catalog().where() + ": " + tensor_text(old.name);
  const Index count = (change.bytes() - kHeadBytes) / kEntryBytes;
  std::uint32_t recorded = 0;
  TRY(stored->read_at(extent.offset, std::as_writable_bytes(std::span(&recorded, 1))));
  if (recorded != count)
    return corrupt(what + ": expected " + count_of(count, "changed byte") + ", got " + with_commas(recorded));
  const SumReader::Sources sources = sources_of(before_);
  SumReader reader(sources);
  Overwrites changes(*stored, extent.offset, count);
  Index next = TRY(changes.position()), begin = 0;
  std::vector<std::byte> difference;
  TRY(for_rows(old, [&](const Box& box) -> Status {
    const MutableBytes bytes = TRY(reader.read(old, box, sources.size()));
    const Index end = begin + std::ssize(bytes);
    const bool is_changed = next >= 0 && next < end;
    if (is_changed) difference.assign(bytes.size(), std::byte{0});
    while (next >= 0 && next < end) {
      const auto at = static_cast<std::size_t>(next - begin);
      difference[at] = bytes[at] ^ changes.take();
      const Index following = TRY(changes.position());
      if (following >= 0 && following <= next)
        return corrupt(what + ": position " + with_commas(following) + " follows " + with_commas(next));
      next = following;
    }
    if (is_changed) TRY(to.write_at(offset + begin, difference));
    begin = end;
    return {};
  }));
  if (next < 0) return {};
  return corrupt(what + ": position " + with_commas(next) + " of " + count_of(old.bytes(), "byte"));
}

Status PublishedDelta::locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) {
  std::vector<std::size_t> changed;
  for (const std::size_t i : tensors) {
    const Tensor& tensor = catalog_.tensors()[i];
    const auto change = stored_->catalog().find(tensor.name);
    if (change) changed.push_back(*change);
    if (!change) zeros_bytes_ = std::max(zeros_bytes_, tensor.bytes());
    if (!change || !overwrites_ || !differences_.emplace(tensor.name, differences_bytes_).second) continue;
    differences_bytes_ += tensor.bytes();
    TRY(locate_before(tensor.name, threads, spool));
  }
  TRY(stored_->locate(changed, threads, spool));
  catalog_.files = stored_->catalog().files;
  const std::uint32_t zeros = TRY(add_file("(zeros)", spool, zeros_bytes_));
  const std::uint32_t differences = TRY(add_file("(differences)", spool, differences_bytes_));
  for (const std::size_t i : tensors) {
    Tensor& tensor = catalog_.tensor(i);
    const auto change = stored_->catalog().find(tensor.name);
    const bool was_located = tensor.located;
    tensor.located = true;
    if (tensor.elements() == 0) continue;
    Extent extent =
        change ? stored_->catalog().tensors()[*change].fragments.extent(0) : Extent{zeros, 0, tensor.bytes()};
    if (change && overwrites_) {
      extent = {differences, differences_.at(tensor.name), tensor.bytes()};
      const auto file = TRY(files_.open(catalog_.file_path(differences)));
      if (!was_located) TRY(write_difference(tensor, stored_->catalog().tensors()[*change], *file, extent.offset));
    }
    tensor.fragments = FragmentList(tensor.shape.rank());
    tensor.fragments.add(dense_fragment(whole(tensor.shape), extent));
  }
  return {};
}

Result<std::string> PublishedDelta::blob_bytes(const Blob& blob) { return stored_->blob_bytes(blob); }
std::string PublishedDelta::describe(const Blob& blob) { return stored_->describe(blob); }

Result<std::optional<std::string>> PublishedDelta::side_file(const std::string& name, Index limit) {
  if (name == kManifestFile) return std::optional<std::string>();
  return base_.side_file(name, limit);
}

Result<std::optional<std::string>> PublishedDelta::side_file_start(const std::string& name, Index length) {
  if (name == kManifestFile) return std::optional<std::string>();
  return base_.side_file_start(name, length);
}

Status check_published(Reader& base, std::span<Reader* const> deltas, const RunOptions& run) {
  std::vector<Reader*> readers = {&base};
  readers.insert(readers.end(), deltas.begin(), deltas.end());
  const SumReader::Sources sources = sources_of(readers);
  const auto& tensors = base.catalog().tensors();
  return parallel_for(std::ssize(tensors), thread_count(run.threads), [&](int, Index number) -> Status {
    const auto i = static_cast<std::size_t>(number);
    const Tensor& tensor = tensors[i];
    const PublishedDelta* last = nullptr;
    std::size_t count = 0;  // of sources up to the last one that changes it
    for (std::size_t k = 0; k < deltas.size(); ++k)
      if (const auto* published = dynamic_cast<const PublishedDelta*>(deltas[k]);
          published && !published->checksum(tensor.name).empty())
        last = published, count = k + 2;
    if (!last || !tensor.located) return {};
    SumReader reader(sources);
    Checksum checksum(last->checksum_format());
    TRY(for_rows(tensor, [&](const Box& box) -> Status {
      checksum.update(TRY(reader.read(tensor, box, count)));
      return {};
    }));
    const std::string expected = last->checksum(tensor.name);
    if (checksum.hex() == expected) return {};
    return unsupported(base.catalog().where() + ": not the model that version " + printable(last->version()) +
                       " was made from, or the delta is damaged: " + tensor_text(tensor.name) + ": expected " +
                       last->checksum_format() + " " + printable(expected) + " after it, got " + checksum.hex());
  });
}

}  // namespace reshard
