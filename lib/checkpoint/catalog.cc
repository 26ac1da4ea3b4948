#include "lib/checkpoint/catalog.h"

#include <algorithm>

#include "lib/base/file.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::uint64_t kNoCrc = ~std::uint64_t{0};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

bool is_same_data(const Tensor& a, const Tensor& b) {
  if (a.dtype != b.dtype || !a.fragments.has_boxes_of(b.fragments)) return false;
  for (std::size_t i = 0; i < a.fragments.size(); ++i)
    if (!(a.fragments.get(i) == b.fragments.get(i))) return false;
  return true;
}

std::string dotted_name(const KeyPath& path) {
  std::vector<std::string> parts;
  for (const auto& key : path)
    parts.push_back(std::holds_alternative<Index>(key) ? std::to_string(std::get<Index>(key))
                                                       : std::get<std::string>(key));
  return join(parts, ".");
}

// ---- FragmentList

FragmentList::FragmentList(int rank) : rank_(rank) {
  static const auto none = std::make_shared<Columns>();
  columns_ = none;
}

FragmentList::Columns& FragmentList::own() {
  if (columns_.use_count() > 1) columns_ = std::make_shared<Columns>(*columns_);
  return *columns_;
}

void FragmentList::reserve(std::size_t n) {
  Columns& c = own();
  c.corners.reserve(n * width());
  c.extents.reserve(n);
}

void FragmentList::add(const Fragment& f) {
  add(f.box, f.extent);
  set(size() - 1, f);
}

void FragmentList::add(const Box& box, const Extent& extent) {
  Columns& c = own();
  c.corners.insert(c.corners.end(), box.origin.begin(), box.origin.end());
  c.corners.insert(c.corners.end(), box.shape.begin(), box.shape.end());
  c.extents.push_back(extent);
  if (!c.crcs.empty()) c.crcs.push_back(kNoCrc);
  if (!c.encoding_of.empty()) c.encoding_of.push_back(0);
}

std::uint64_t FragmentList::hash_of_boxes() const {
  std::uint64_t h = 0x9e3779b97f4a7c15;
  for (const Index n : columns_->corners) {
    h = (h ^ static_cast<std::uint64_t>(n)) * 0xff51afd7ed558ccd;
    h ^= h >> 32;
  }
  return h;
}

void FragmentList::set(std::size_t i, const Fragment& f) {
  Columns& c = own();
  Index* corner = c.corners.data() + i * width();
  corner = std::copy(f.box.origin.begin(), f.box.origin.end(), corner);
  std::copy(f.box.shape.begin(), f.box.shape.end(), corner);
  c.extents[i] = f.extent;
  if (f.crc && c.crcs.empty()) c.crcs.assign(size(), kNoCrc);
  if (!c.crcs.empty()) c.crcs[i] = f.crc ? *f.crc : kNoCrc;
  if (f.start != 0 || f.big_endian || f.strides != row_major_strides(f.box.shape))
    c.details[i] = {f.strides, f.start, f.big_endian};
  else if (!c.details.empty())
    c.details.erase(i);
  if (!f.encoding && c.encoding_of.empty()) return;
  if (c.encodings.empty()) {
    c.encodings.emplace_back();
    c.encoding_of.assign(size(), 0);
  }
  auto known = std::find(c.encodings.begin(), c.encodings.end(), f.encoding);
  if (known == c.encodings.end()) known = c.encodings.insert(known, f.encoding);
  c.encoding_of[i] = static_cast<std::uint16_t>(known - c.encodings.begin());
}

Box FragmentList::box(std::size_t i) const {
  const Index* corner = columns_->corners.data() + i * width();
  const auto rank = static_cast<std::size_t>(rank_);
  return {Dims(std::span(corner, rank)), Dims(std::span(corner + rank, rank))};
}

Fragment FragmentList::get(std::size_t i) const {
  const Columns& c = *columns_;
  Fragment f;
  f.box = box(i);
  f.extent = c.extents[i];
  if (!c.crcs.empty() && c.crcs[i] != kNoCrc) f.crc = static_cast<std::uint32_t>(c.crcs[i]);
  if (const auto it = c.details.find(i); it != c.details.end()) {
    f.strides = it->second.strides;
    f.start = it->second.start;
    f.big_endian = it->second.big_endian;
  } else {
    f.strides = row_major_strides(f.box.shape);
  }
  if (!c.encoding_of.empty()) f.encoding = c.encodings[c.encoding_of[i]];
  return f;
}

// ---- Catalog

Status Catalog::add(Tensor tensor) {
  if (!index_.emplace(tensor.name, tensors_.size()).second)
    return corrupt(root + ": " + tensor_text(tensor.name) + " is there twice");
  tensors_.push_back(std::move(tensor));
  return {};
}

std::optional<std::size_t> Catalog::find(std::string_view name) const {
  const auto it = index_.find(std::string(name));
  if (it == index_.end()) return std::nullopt;
  return it->second;
}

std::optional<std::size_t> Catalog::find_parameter(std::string_view key) const {
  for (const Part& part : parts)
    if (part.kind == StateKind::kModel && !part.prefix.empty()) return find(part.prefix + std::string(key));
  return find(key);
}

void Catalog::sort_by_name() {
  std::sort(tensors_.begin(), tensors_.end(),
            [](const Tensor& a, const Tensor& b) { return natural_less(a.name, b.name); });
  for (std::size_t i = 0; i < tensors_.size(); ++i) index_[tensors_[i].name] = i;
  std::sort(blobs.begin(), blobs.end(), [](const Blob& a, const Blob& b) { return natural_less(a.name, b.name); });
}

std::string Catalog::file_path(std::uint32_t file) const { return path_join(root, files[file].path); }

std::vector<std::string> Catalog::file_paths() const {
  std::vector<std::string> out;
  for (const CatalogFile& file : files) out.push_back(path_join(root, file.path));
  return out;
}

Index Catalog::tensor_bytes() const {
  Index sum = 0;
  for (const Tensor& t : tensors_) sum += t.bytes();
  return sum;
}

bool natural_less(std::string_view a, std::string_view b) {
  std::size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (is_digit(a[i]) && is_digit(b[j])) {
      while (i < a.size() && a[i] == '0') ++i;
      while (j < b.size() && b[j] == '0') ++j;
      std::size_t m = i, n = j;
      while (m < a.size() && is_digit(a[m])) ++m;
      while (n < b.size() && is_digit(b[n])) ++n;
      if (m - i != n - j) return m - i < n - j;
      const int order = a.substr(i, m - i).compare(b.substr(j, n - j));
      if (order != 0) return order < 0;
      i = m;
      j = n;
    } else if (a[i] != b[j]) {
      return a[i] < b[j];
    } else {
      ++i;
      ++j;
    }
  }
  if (i < a.size() || j < b.size()) return j < b.size();
  return a < b;  // equal but for leading zeros
}

}  // namespace reshard
