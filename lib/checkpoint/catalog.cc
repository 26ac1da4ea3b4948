// SPDX-License-Identifier: Apache-2.0
#include "lib/checkpoint/catalog.h"

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>

#include "lib/base/file.h"
#include "lib/base/memory_limit.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::uint64_t kNoCrc = ~std::uint64_t{0};

// Names the purpose of an allocation, for may_take().
std::string tensors_text(const std::string& root, Index n) {
  return (root.empty() ? "the output" : root) + ": " + count_of(n, "tensor");
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::uint64_t hash_of(std::string_view name) { return std::hash<std::string_view>()(name); }

}  // namespace

Fragment dense_fragment(const Box& box, const Extent& extent) {
  Fragment out;
  out.strides = row_major_strides(box.shape);
  out.box = box;
  out.extent = extent;
  return out;
}

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

// ---- ExtentList

ExtentList::ExtentList(const ExtentList& from)
    : one_(from.one_), several_(from.several_ ? std::make_unique<Several>(*from.several_) : nullptr) {}

Extent ExtentList::Several::of_run(std::size_t i) const {
  const Run& run = *std::prev(
      std::upper_bound(runs.begin(), runs.end(), i, [](std::size_t n, const Run& r) { return n < r.begin; }));
  Extent extent = run.first;
  extent.file += run.step * static_cast<std::uint32_t>(i - run.begin);
  return extent;
}

std::vector<Extent>& ExtentList::each() {
  if (!several_) {
    auto several = std::make_unique<Several>();
    if (size() == 1) several->each.push_back(one_);
    several_ = std::move(several);
  }
  Several& s = *several_;
  if (s.runs.empty()) return s.each;
  s.each.reserve(s.packed);
  for (std::size_t i = 0; i < s.packed; ++i) s.each.push_back(s.of_run(i));
  s.runs = std::vector<Run>();
  return s.each;
}

void ExtentList::reserve(std::size_t n) {
  if (n > 1) each().reserve(n);
}

void ExtentList::add(const Extent& extent) {
  if (size() == 0 && !several_)
    one_ = extent;
  else
    each().push_back(extent);
}

void ExtentList::set(std::size_t i, const Extent& extent) { (several_ ? each()[i] : one_) = extent; }

void ExtentList::pack() {
  if (!several_ || !several_->runs.empty()) return;
  std::vector<Extent>& each = several_->each;
  if (each.size() < 2) {
    one_ = each.empty() ? Extent{kNoFile, 0, 0} : each[0];
    several_ = nullptr;
    return;
  }
  std::vector<Run> runs;
  const std::size_t most = each.size() * sizeof(Extent) / (2 * sizeof(Run));
  for (std::size_t i = 0; i < each.size(); ++i) {
    const Extent& e = each[i];
    if (!runs.empty()) {
      Run& last = runs.back();
      const auto n = static_cast<std::uint32_t>(i) - last.begin;
      if (n == 1 && e.file > last.first.file) last.step = e.file - last.first.file;
      if (last.step > 0 && e == Extent{last.first.file + n * last.step, last.first.offset, last.first.length}) continue;
      if (n == 1) last.step = 0;
    }
    if (runs.size() == most) return each.shrink_to_fit();
    runs.push_back({e, static_cast<std::uint32_t>(i), 0});
  }
  runs.shrink_to_fit();
  several_->packed = each.size();
  several_->runs = std::move(runs);
  each = std::vector<Extent>();  // frees its memory
}

// ---- FragmentList

FragmentList::Columns::Columns(const Columns& from)
    : boxes(from.boxes), extents(from.extents), rare(from.rare ? std::make_unique<Rare>(*from.rare) : nullptr) {}

const std::shared_ptr<FragmentList::Columns>& FragmentList::none(int rank) {
  static const auto empty = [] {
    std::array<std::shared_ptr<Columns>, kMaxRank + 1> of_rank;
    for (int r = 0; r <= kMaxRank; ++r) of_rank[r] = std::make_shared<Columns>(std::make_shared<Boxes>(Boxes{r}));
    return of_rank;
  }();
  return empty[rank];
}

FragmentList& FragmentList::operator=(FragmentList&& from) noexcept {
  columns_ = std::exchange(from.columns_, none(from.rank()));
  return *this;
}

FragmentList::Columns& FragmentList::own() {
  if (columns_.use_count() > 1) columns_ = std::make_shared<Columns>(*columns_);
  return *columns_;
}

std::vector<Index>& FragmentList::own_corners() {
  SharedBoxes& boxes = own().boxes;
  if (boxes.use_count() > 1) boxes = std::make_shared<Boxes>(*boxes);
  return boxes->corners;
}

void FragmentList::pack() {
  if (columns_.use_count() > 1) return;
  if (columns_->boxes.use_count() == 1) columns_->boxes->corners.shrink_to_fit();
  columns_->extents.pack();
}

FragmentList::Rare& FragmentList::own_rare() {
  std::unique_ptr<Rare>& rare = own().rare;
  if (!rare) rare = std::make_unique<Rare>();
  return *rare;
}

const FragmentList::Rare& FragmentList::rare() const {
  static const Rare none;
  return columns_->rare ? *columns_->rare : none;
}

void FragmentList::reserve(std::size_t n) {
  own_corners().reserve(n * columns_->boxes->width());
  own().extents.reserve(n);
}

void FragmentList::add(const Fragment& f) {
  add(f.box, f.extent);
  set(size() - 1, f);
}

void FragmentList::add(const Box& box, const Extent& extent) {
  std::vector<Index>& corners = own_corners();
  corners.insert(corners.end(), box.origin.begin(), box.origin.end());
  corners.insert(corners.end(), box.shape.begin(), box.shape.end());
  own().extents.add(extent);
  if (!columns_->rare) return;
  Rare& r = own_rare();
  if (!r.crcs.empty()) r.crcs.push_back(kNoCrc);
  if (!r.encoding_of.empty()) r.encoding_of.push_back(0);
}

std::uint64_t FragmentList::hash_of_boxes() const {
  std::uint64_t h = 0x9e3779b97f4a7c15;
  for (const Index n : columns_->boxes->corners) {
    h = (h ^ static_cast<std::uint64_t>(n)) * 0xff51afd7ed558ccd;
    h ^= h >> 32;
  }
  return h;
}

void FragmentList::set(std::size_t i, const Fragment& f) {
  if (!(f.box == box(i))) {
    Index* corner = own_corners().data() + i * columns_->boxes->width();
    corner = std::copy(f.box.origin.begin(), f.box.origin.end(), corner);
    std::copy(f.box.shape.begin(), f.box.shape.end(), corner);
  }
  if (!(extent(i) == f.extent)) set_extent(i, f.extent);
  const bool has_details = f.start != 0 || f.big_endian || f.strides != row_major_strides(f.box.shape);
  if (!has_details && !f.crc && !f.encoding && !columns_->rare) return;
  Rare& r = own_rare();
  if (f.crc && r.crcs.empty()) r.crcs.assign(size(), kNoCrc);
  if (!r.crcs.empty()) r.crcs[i] = f.crc ? *f.crc : kNoCrc;
  if (has_details)
    r.details[i] = {f.strides, f.start, f.big_endian};
  else if (!r.details.empty())
    r.details.erase(i);
  if (!f.encoding && r.encoding_of.empty()) return;
  if (r.encodings.empty()) {
    r.encodings.emplace_back();
    r.encoding_of.assign(size(), 0);
  }
  auto known = std::find(r.encodings.begin(), r.encodings.end(), f.encoding);
  if (known == r.encodings.end()) known = r.encodings.insert(known, f.encoding);
  r.encoding_of[i] = static_cast<std::uint16_t>(known - r.encodings.begin());
}

Box FragmentList::box(std::size_t i) const {
  const Boxes& boxes = *columns_->boxes;
  const Index* corner = boxes.corners.data() + i * boxes.width();
  const std::size_t rank = boxes.rank;
  return {Dims(std::span(corner, rank)), Dims(std::span(corner + rank, rank))};
}

Fragment FragmentList::get(std::size_t i) const {
  const Rare& r = rare();
  Fragment f;
  f.box = box(i);
  f.extent = extent(i);
  if (!r.crcs.empty() && r.crcs[i] != kNoCrc) f.crc = static_cast<std::uint32_t>(r.crcs[i]);
  if (const auto it = r.details.find(i); it != r.details.end()) {
    f.strides = it->second.strides;
    f.start = it->second.start;
    f.big_endian = it->second.big_endian;
  } else {
    f.strides = row_major_strides(f.box.shape);
  }
  if (!r.encoding_of.empty()) f.encoding = r.encodings[r.encoding_of[i]];
  return f;
}

void BoxPool::share(FragmentList& list) {
  constexpr std::size_t kKept = 16;                           // more than the kinds of parameters in a layer
  if (list.empty() || list.columns_.use_count() > 1) return;  // copies already share everything
  const FragmentList::SharedBoxes& mine = list.columns_->boxes;
  for (const FragmentList::SharedBoxes& known : recent_) {
    if (known == mine) return;
    if (*known != *mine) continue;
    list.own().boxes = known;
    return;
  }
  if (recent_.size() < kKept) {
    recent_.push_back(mine);
  } else {
    recent_[oldest_] = mine;
    oldest_ = (oldest_ + 1) % kKept;
  }
}

// ---- Catalog

const Catalog::Held& Catalog::held() const {
  static const Held none;
  return held_ ? *held_ : none;
}

Catalog::Held& Catalog::own() {
  if (!held_)
    held_ = std::make_shared<Held>();
  else if (held_.use_count() > 1)
    held_ = std::make_shared<Held>(*held_);
  return *held_;
}

// Rehashes the names, with room for `room` of them.
void Catalog::Held::find_places(std::size_t room) {
  by_name.make(room, [this](std::size_t i) { return hash_of(tensors[i].name); });
}

void Tensor::take_location(const Tensor& other) {
  fragments = other.fragments;
  replicas = other.replicas;
  dtype = other.dtype;
  located = other.located;
}

Dims Tensor::joined_shape() const {
  if (columns == 1) return shape;
  Dims out(shape.span().first(static_cast<std::size_t>(shape.rank() - 1)));
  out[out.rank() - 1] *= columns;
  return out;
}

Catalog Catalog::without_tensors() const {
  Catalog out;
  out.root = root;
  out.files = files;
  out.blobs = blobs;
  out.attributes = attributes;
  out.vocabulary = vocabulary;
  out.delta_of = delta_of;
  return out;
}

Status Catalog::reserve(std::size_t tensors) {
  const Index bytes = static_cast<Index>(tensors) * kTensorBytes;
  TRY(may_take(bytes, [&] { return tensors_text(root, static_cast<Index>(tensors)); }));
  Held& held = own();
  held.tensors.reserve(tensors);
  if (tensors > held.by_name.room()) held.find_places(tensors);
  return {};
}

Status Catalog::add(Tensor tensor) {
  if (find(tensor.name)) return corrupt(root + ": " + tensor_text(tensor.name) + " is stored twice");
  for (FragmentList* const list : {&tensor.fragments, &tensor.replicas}) {
    boxes_.share(*list);
    list->pack();
  }
  added_bytes_ += kTensorBytes + static_cast<Index>(tensor.fragments.size() * sizeof(Extent));
  if (added_bytes_ >= kMuchMemory) {
    added_bytes_ = 0;
    TRY(may_hold([&] { return tensors_text(root, std::ssize(tensors())) + " and more"; }));
  }
  Held& held = own();
  held.tensors.push_back(std::move(tensor));
  held.by_name.add([&](std::size_t i) { return hash_of(held.tensors[i].name); });
  return {};
}

std::optional<std::size_t> Catalog::find(std::string_view name) const {
  return held().by_name.find(hash_of(name), [&](std::size_t i) { return tensors()[i].name == name; });
}

std::optional<std::size_t> Catalog::find_parameter(std::string_view key) const {
  for (const Part& part : parts)
    if (part.kind == StateKind::kModel && !part.prefix.empty()) return find(part.prefix + std::string(key));
  return find(key);
}

void Catalog::sort_by_name() {
  const auto before = [](const Tensor& a, const Tensor& b) { return natural_less(a.name, b.name); };
  if (!std::is_sorted(tensors().begin(), tensors().end(), before)) {
    Held& held = own();
    std::sort(held.tensors.begin(), held.tensors.end(), before);
    held.find_places(held.tensors.size());
  }
  std::sort(blobs.begin(), blobs.end(), [](const Blob& a, const Blob& b) { return natural_less(a.name, b.name); });
}

std::string Catalog::file_path(std::uint32_t file) const { return path_join(root, files[file].path); }

std::string Catalog::where() const { return files.size() == 1 && metadata_files.empty() ? file_path(0) : root; }

std::vector<std::string> Catalog::file_paths() const {
  std::vector<std::string> out;
  for (const CatalogFile& file : files) out.push_back(path_join(root, file.path));
  return out;
}

Index Catalog::tensor_bytes() const {
  Index sum = 0;
  for (const Tensor& t : tensors()) sum += t.bytes();
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
  return a < b;  // equal except for leading zeros
}

}  // namespace reshard
