// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/published_delta.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <utility>

#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/base/xor_bytes.h"
#include "lib/base/xxh3.h"
#include "lib/checkpoint/side_files.h"
#include "lib/source/tensor_source.h"

namespace reshard {
namespace {

constexpr std::string_view kEncoding = "delta_encoding";
constexpr std::string_view kXxh3 = "xxh3-128", kAdler = "adler32";

std::string attribute(const Catalog& catalog, std::string_view key) {
  for (const auto& [name, value] : catalog.attributes)
    if (name == key) return value;
  return {};
}

// A checksum in one of the two formats.
class Checksum {
 public:
  explicit Checksum(bool is_adler) : is_adler_(is_adler) {}
  void update(Bytes bytes) {
    if (!is_adler_) return xxh3_.update(bytes);
    adler_ = ::adler32_z(adler_, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size());
  }
  std::string hex() const {
    if (!is_adler_) return xxh3_.hex();
    std::array<char, 17> text;
    std::snprintf(text.data(), text.size(), "%08lx", adler_);
    return text.data();
  }

 private:
  const bool is_adler_;
  uLong adler_ = 1;
  Xxh3 xxh3_;
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

}  // namespace

bool PublishedDelta::is_one(const Catalog& catalog) {
  return !catalog.delta_of.empty() && !attribute(catalog, kEncoding).empty();
}

PublishedDelta::PublishedDelta(std::unique_ptr<Reader> stored, Reader& base) : stored_(std::move(stored)), base_(base) {
  files_ = stored_->files();
  catalog_ = stored_->catalog().without_tensors();
  catalog_.parts = base.catalog().parts;
  catalog_.has_model_names = base.catalog().has_model_names;
  catalog_.vocabulary = base.catalog().vocabulary;
  catalog_.header_metadata = base.catalog().header_metadata;
  catalog_.shares_extents = true;  // of the zeros
}

Result<std::unique_ptr<Reader>> PublishedDelta::open(std::unique_ptr<Reader> stored, Reader& base) {
  std::unique_ptr<PublishedDelta> out(new PublishedDelta(std::move(stored), base));
  TRY(out->read_facts().context(out->catalog_.root));
  TRY(out->take_tensors());
  return std::unique_ptr<Reader>(std::move(out));
}

Status PublishedDelta::read_facts() {
  const Catalog& stored = stored_->catalog();
  version_ = attribute(stored, "version");
  base_version_ = attribute(stored, "base_version");
  checksum_format_ = attribute(stored, "checksum_format");
  using Expected = std::pair<std::string_view, const char*>;
  for (const auto& [key, expected] : {Expected{kEncoding, "xor"}, Expected{"compression_format", "zstd"}})
    if (const std::string got = attribute(stored, key); got != expected)
      return unsupported(std::string(key) + ": expected " + expected + ", got '" + printable(got) +
                         "'; publish it with " + expected);
  if (checksum_format_ != kXxh3 && checksum_format_ != kAdler)
    return unsupported("checksum_format: expected xxh3-128 or adler32, got '" + printable(checksum_format_) +
                       "'; publish it with one of these");
  for (const auto& [key, value] : stored.header_metadata) checksums_[key] = value;
  return {};
}

Status PublishedDelta::take_tensors() {
  const Catalog &stored = stored_->catalog(), &model = base_.catalog();
  for (const Tensor& change : stored.tensors()) {
    const auto number = model.find(change.name);
    const std::string what = stored.root + ": changes " + tensor_text(change.name);
    if (!number)
      return unsupported(what + ", which " + model.root +
                         " lacks: apply it to the Hugging Face model that it was made from");
    if (const Tensor& old = model.tensors()[*number]; old.bytes() != change.bytes())
      return unsupported(what + " of " + count_of(change.bytes(), "byte") + "; " + model.root + " has " +
                         with_commas(old.bytes()) + ": it is not the model that it was made from");
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

std::string PublishedDelta::checksum(const std::string& tensor) const {
  const auto found = stored_->catalog().find(tensor) ? checksums_.find(tensor) : checksums_.end();
  return found == checksums_.end() ? std::string() : found->second;
}

Status PublishedDelta::locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) {
  std::vector<std::size_t> changed;
  for (const std::size_t i : tensors) {
    const Tensor& tensor = catalog_.tensors()[i];
    if (const auto change = stored_->catalog().find(tensor.name))
      changed.push_back(*change);
    else
      zeros_bytes_ = std::max(zeros_bytes_, tensor.bytes());
  }
  TRY(stored_->locate(changed, threads, spool));
  catalog_.files = stored_->catalog().files;
  const auto zeros = static_cast<std::uint32_t>(catalog_.files.size());
  catalog_.files.push_back({"(zeros)", zeros_bytes_});
  const std::string path = catalog_.file_path(zeros);
  if (!has_zeros_) files_.pin(path, TRY(File::create_anonymous(spool)));
  has_zeros_ = true;
  if (const auto file = TRY(files_.open(path)); TRY(file->size()) < zeros_bytes_) TRY(file->set_length(zeros_bytes_));
  for (const std::size_t i : tensors) {
    Tensor& tensor = catalog_.tensor(i);
    const auto change = stored_->catalog().find(tensor.name);
    tensor.located = true;
    if (tensor.elements() == 0) continue;
    const Extent extent =
        change ? stored_->catalog().tensors()[*change].fragments.extent(0) : Extent{zeros, 0, tensor.bytes()};
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
  std::vector<std::unique_ptr<FileSource>> sources;
  sources.push_back(std::make_unique<FileSource>(base.catalog(), base.files()));
  for (Reader* delta : deltas) sources.push_back(std::make_unique<FileSource>(delta->catalog(), delta->files()));
  const auto& tensors = base.catalog().tensors();
  return parallel_for(std::ssize(tensors), thread_count(run.threads), [&](int, Index number) -> Status {
    const auto i = static_cast<std::size_t>(number);
    const Tensor& tensor = tensors[i];
    const PublishedDelta* last = nullptr;
    for (Reader* delta : deltas)
      if (const auto* published = dynamic_cast<const PublishedDelta*>(delta);
          published && !published->checksum(tensor.name).empty())
        last = published;
    if (!last || !tensor.located) return {};
    constexpr std::size_t kScratch = std::size_t{1} << 20;
    std::vector<std::byte> sum, next, scratch(kScratch);
    Checksum checksum(last->checksum_format() == kAdler);
    TRY(for_rows(tensor, [&](const Box& box) -> Status {
      sum.resize(static_cast<std::size_t>(volume(box) * byte_size(tensor.dtype)));
      next.resize(sum.size());
      for (std::size_t s = 0; s < sources.size(); ++s) {
        const auto at = sources[s]->catalog().find(tensor.name);
        if (!at)
          return unsupported(sources[s]->catalog().root + ": lacks " + tensor_text(tensor.name) +
                             ", which a published delta changes: make it from models with these names");
        TRY(sources[s]->read(*at, box, s == 0 ? sum : next, scratch));
        if (s > 0) xor_into(sum, next);
        if (s > 0 && deltas[s - 1] == last) break;
      }
      checksum.update(sum);
      return {};
    }));
    const std::string expected = last->checksum(tensor.name);
    if (checksum.hex() == expected) return {};
    return unsupported(base.catalog().root + ": not the model that version " + printable(last->version()) +
                       " was made from, or the delta is damaged: " + tensor_text(tensor.name) + ": expected " +
                       last->checksum_format() + " " + printable(expected) + " after it, got " + checksum.hex());
  });
}

}  // namespace reshard
