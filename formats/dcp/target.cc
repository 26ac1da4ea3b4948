// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "formats/dcp/dcp.h"
#include "formats/dcp/metadata.h"
#include "formats/encoding/torch_archive.h"
#include "formats/tensor_files/parameter_lists.h"
#include "lib/base/text.h"

namespace reshard::dcp {
namespace {

constexpr Index kMaxBytes = Index{1} << 62;  // limit for all tensors, so that the archives around them stay below 2^63

Box joined(const Dims& at, const Box& box) {
  Box out{at, Dims::filled(at.rank(), 1)};
  for (int d = 0; d < box.rank(); ++d) {
    out.origin.push_back(box.origin[d]);
    out.shape.push_back(box.shape[d]);
  }
  return out;
}

// The boxes of tensors with one shape and placement on the mesh.
struct Cut {
  Dims shape;
  SharedPlacement placement;
  FragmentList boxes;  // the extents have only the file, which is the rank
};

// Builds items one after the other. Most are equal to the previous one, which is cached.
class Items {
 public:
  torch_archive::Item& of(DType dtype, const Dims& shape, Index offset) {
    const Index phase = offset % torch_archive::kAlignment;
    if (last_ && dtype == dtype_ && shape == shape_ && phase == phase_) return *last_;
    dtype_ = dtype;
    shape_ = shape;
    phase_ = phase;
    return last_.emplace(dtype, shape, offset);
  }

 private:
  std::optional<torch_archive::Item> last_;  // the last item, for this dtype, shape and offset
  DType dtype_ = DType::kFloat32;
  Dims shape_;
  Index phase_ = 0;
};

// The target. Everything about an item is in the catalog's fragments, except the lengths around its payload, because a
// large job has millions of items.
class DcpTarget : public Target, private MetadataContents {
 public:
  DcpTarget(LayoutRequest request, DcpStorage storing) : request_(std::move(request)), storing_(std::move(storing)) {}

  Status lay_out();
  bool wants_crcs() const override { return true; }
  Status seal(const PayloadCrc& crc, const EmitBytes& emit) const override;
  Status seal_at(const Extent& place, const PayloadCrc& crc, const EmitBytes& emit) const override;

 private:
  // The lengths before and after an item's payload. Items share few combinations of them.
  struct Around {
    Index header = 0, trailer = 0;
    friend bool operator==(const Around&, const Around&) = default;
  };
  // The number of an item among all items, in the order of the entries.
  using ItemNumber = std::uint32_t;
  // The items of an entry that are one slice of a tensor: its fragments, or as many of its replicas.
  struct Part {
    std::uint32_t entry = 0;  // without the blobs'
    std::uint32_t tensor = 0;
    std::uint32_t slice = 0;   // number among the tensor's slices; the first has the fragments
    std::uint32_t around = 0;  // the first item's index in around_
    ItemNumber number = 0;     // the first item's number
  };
  // A stored tensor while its slices are laid out, as its first slice described it.
  struct Stored {
    std::uint32_t entry = 0;
    std::uint32_t tensor = 0;
    const Slice* slice = nullptr;
  };

  // The entries are the blobs, then the stored tensors.
  std::size_t entries() const override { return blobs_.size() + first_parts_.size(); }
  Entry entry(std::size_t e) const override;
  void each_item(std::size_t e, const VisitItem& visit) const override;
  std::string_view file(std::uint32_t number) const override;

  const Tensor& tensor_of(const Part& part) const { return catalog_.tensors()[part.tensor]; }
  const Slice* slice_of(const Part& part) const;  // null if the tensor itself is stored
  std::uint32_t count(const Part& part) const { return static_cast<std::uint32_t>(tensor_of(part).fragments.size()); }
  // Returns the box and the payload of item i of a part.
  std::pair<Box, Extent> payload_of(const Part& part, std::uint32_t i) const;
  WrittenItem item_of(const Part& part, std::uint32_t i) const;
  WrittenItem item(ItemNumber number) const;
  std::pair<const Part*, std::uint32_t> part_of(ItemNumber number) const;
  std::span<const Part> parts_of(std::size_t entry) const;  // without the blobs'
  const std::string& stored_name(const Part& part) const;
  // Returns the cut of a tensor with this shape.
  static Dims stored_shape(const Slice* slice, const Dims& shape);
  const std::vector<ItemNumber>& in_files() const;
  void find_places() const;
  Status seal_item(ItemNumber number, Items& items, const PayloadCrc& crc, const EmitBytes& emit) const;
  Status seal_texts(const Extent* place, const EmitBytes& emit) const;
  Status add_tensor(std::size_t number);
  Result<const Cut*> cut_of(const TargetTensor& wanted);
  Result<std::uint32_t> entry_of(std::size_t number, const Slice* slice);
  void number_items();
  Result<std::uint16_t> kind_of(const Around& around);
  std::uint32_t append_file(const std::string& name, Index size);

  LayoutRequest request_;  // its tensors move to the catalog at the end of the layout
  DcpStorage storing_;
  std::vector<Extent> blobs_;
  std::vector<Part> parts_;                 // in the order of the entries, after the layout
  std::vector<std::uint32_t> first_parts_;  // the first part of each entry, not counting blobs
  std::uint32_t stored_tensors_ = 0;        // entries so far, not counting blobs
  std::map<std::string, Stored> stored_;    // by name, if there are slices
  std::vector<Around> kinds_;
  std::vector<std::uint16_t> around_;  // for each item, its index in kinds_
  std::deque<Cut> cuts_;               // of the most recent tensors
  Items items_;                        // used during the layout
  std::uint32_t metadata_file_ = 0;
  Index bytes_ = 0;  // bytes of the tensors so far
  mutable std::once_flag places_found_;
  mutable std::vector<ItemNumber> in_files_;  // all items, by file and offset
};

std::uint32_t DcpTarget::append_file(const std::string& name, Index size) {
  catalog_.files.push_back({name, size});
  return static_cast<std::uint32_t>(catalog_.files.size() - 1);
}

Status DcpTarget::lay_out() {
  for (Index rank = 0; rank < request_.mesh.ranks(); ++rank)
    append_file(storing_.directory + "__" + std::to_string(rank) + "_0" + std::string(kDataEnding), 0);
  for (const TargetBlob& blob : request_.blobs) {
    blobs_.push_back({0, catalog_.files[0].size, std::ssize(blob.bytes)});
    catalog_.files[0].size += std::ssize(blob.bytes);
  }
  TRY(catalog_.reserve(request_.tensors.size()));
  if (storing_.slices.empty()) parts_.reserve(request_.tensors.size());
  for (std::size_t i = 0; i < request_.tensors.size(); ++i) TRY(add_tensor(i));
  around_.shrink_to_fit();
  cuts_.clear();
  for (std::size_t i = 0; i < request_.tensors.size(); ++i)
    catalog_.tensor(i).path = std::move(request_.tensors[i].path);
  request_.tensors = std::vector<TargetTensor>();  // frees the memory
  number_items();
  for (const Part& part : parts_)
    if (!checked_volume(stored_shape(slice_of(part), tensor_of(part).shape)))
      return unsupported(tensor_text(stored_name(part)) + ": 2^63 elements or more");
  Index size = 0;
  TRY(write_metadata(*this, [&](std::string_view bytes) -> Status {
    size += std::ssize(bytes);
    return {};
  }));
  metadata_file_ = append_file(storing_.directory + std::string(kMetadataFile), size);
  for (const auto& [name, text] : storing_.texts) append_file(name, std::ssize(text));
  return {};
}

std::string_view DcpTarget::file(std::uint32_t number) const {
  return std::string_view(catalog_.files[number].path).substr(storing_.directory.size());
}

// Sorts the parts by entry and numbers their items.
void DcpTarget::number_items() {
  const auto is_before = [](const Part& a, const Part& b) { return a.entry < b.entry; };
  if (!std::is_sorted(parts_.begin(), parts_.end(), is_before))
    std::stable_sort(parts_.begin(), parts_.end(), is_before);
  first_parts_.reserve(stored_tensors_);
  auto number = static_cast<ItemNumber>(blobs_.size());
  for (std::size_t p = 0; p < parts_.size(); ++p) {
    if (parts_[p].entry == first_parts_.size()) first_parts_.push_back(static_cast<std::uint32_t>(p));
    parts_[p].number = number;
    number += count(parts_[p]);
  }
}

const Slice* DcpTarget::slice_of(const Part& part) const {
  return storing_.slices.empty() ? nullptr : &storing_.slices[part.tensor][part.slice];
}

std::span<const DcpTarget::Part> DcpTarget::parts_of(std::size_t entry) const {
  const std::size_t end = entry + 1 < first_parts_.size() ? first_parts_[entry + 1] : parts_.size();
  return std::span(parts_).subspan(first_parts_[entry], end - first_parts_[entry]);
}

const std::string& DcpTarget::stored_name(const Part& part) const {
  const Slice* const slice = slice_of(part);
  return slice ? slice->stored : tensor_of(part).name;
}

Dims DcpTarget::stored_shape(const Slice* slice, const Dims& shape) {
  Dims out = slice ? slice->counts : Dims();
  for (const Index n : shape) out.push_back(n);
  return out;
}

DcpTarget::Entry DcpTarget::entry(std::size_t e) const {
  if (e < blobs_.size()) return {request_.blobs[e].name, request_.blobs[e].path, std::nullopt, {}};
  const Part& part = parts_of(e - blobs_.size()).front();
  const Tensor& first = tensor_of(part);
  const std::string& name = stored_name(part);
  return {name, first.name == name ? first.path : KeyPath{name}, first.dtype,
          stored_shape(slice_of(part), first.shape)};
}

std::pair<Box, Extent> DcpTarget::payload_of(const Part& part, std::uint32_t i) const {
  const Tensor& tensor = tensor_of(part);
  const FragmentList& list = part.slice == 0 ? tensor.fragments : tensor.replicas;
  if (part.slice > 0) i += (part.slice - 1) * count(part);
  return {list.box(i), list.extent(i)};
}

// Returns item i of a part.
WrittenItem DcpTarget::item_of(const Part& part, std::uint32_t i) const {
  const auto [box, payload] = payload_of(part, i);
  const Around& around = kinds_[around_[part.around + i]];
  const Slice* const slice = slice_of(part);
  return {slice ? joined(slice->at, box) : box, payload.file, payload.offset - around.header,
          payload.length + around.header + around.trailer};
}

WrittenItem DcpTarget::item(ItemNumber number) const {
  if (number < blobs_.size()) {  // the first entries, with one item each
    const Extent& blob = blobs_[number];
    return {Box{}, blob.file, blob.offset, blob.length};
  }
  const auto [part, i] = part_of(number);
  return item_of(*part, i);
}

// Returns the part of an item that is not a blob's, and the item's number in it.
std::pair<const DcpTarget::Part*, std::uint32_t> DcpTarget::part_of(ItemNumber number) const {
  const auto begins_after = [](ItemNumber n, const Part& part) { return n < part.number; };
  const Part& part = *std::prev(std::upper_bound(parts_.begin(), parts_.end(), number, begins_after));
  return {&part, number - part.number};
}

void DcpTarget::each_item(std::size_t e, const VisitItem& visit) const {
  if (e < blobs_.size()) return visit(item(static_cast<ItemNumber>(e)));
  for (const Part& part : parts_of(e - blobs_.size()))
    for (std::uint32_t i = 0; i < count(part); ++i) visit(item_of(part, i));
}

// Returns the entry of the stored tensor that holds this slice (null: of the tensor itself), and adds one if necessary.
Result<std::uint32_t> DcpTarget::entry_of(std::size_t number, const Slice* slice) {
  const TargetTensor& wanted = request_.tensors[number];
  if ((slice ? slice->counts.rank() : 0) + wanted.shape.rank() > kMaxRank)
    return unsupported(tensor_text(wanted.name) + ": would be stored with more than " + std::to_string(kMaxRank) +
                       " dimensions");
  if (!slice) return stored_tensors_++;
  const Stored made{stored_tensors_, static_cast<std::uint32_t>(number), slice};
  const auto [there, is_new] = stored_.emplace(slice->stored, made);
  if (is_new) return stored_tensors_++;
  const Stored& stored = there->second;
  const TargetTensor& first = request_.tensors[stored.tensor];
  const Dims shape = stored_shape(slice, wanted.shape), known = stored_shape(stored.slice, first.shape);
  if (known == shape && first.dtype == wanted.dtype) return stored.entry;
  return unsupported(tensor_text(wanted.name) + ": is " + type_text(wanted.dtype, wanted.shape) +
                     ", and another tensor that would be stored with it as '" + slice->stored + "' is " +
                     type_text(first.dtype, known));
}

Result<std::uint16_t> DcpTarget::kind_of(const Around& around) {
  const auto known = std::find(kinds_.rbegin(), kinds_.rend(), around);
  if (known != kinds_.rend()) return static_cast<std::uint16_t>(kinds_.rend() - known - 1);
  if (kinds_.size() > std::numeric_limits<std::uint16_t>::max())
    return internal_error("DCP items with more than 65,536 kinds of headers");
  kinds_.push_back(around);
  return static_cast<std::uint16_t>(kinds_.size() - 1);
}

Result<const Cut*> DcpTarget::cut_of(const TargetTensor& wanted) {
  constexpr std::size_t kKept = 32;  // more than the kinds of parameters in a layer
  for (const Cut& cut : cuts_)
    if (cut.shape == wanted.shape && cut.placement == wanted.placement) return &cut;
  Tensor tensor;
  tensor.name = wanted.name;
  tensor.dtype = wanted.dtype;
  tensor.shape = wanted.shape;
  tensor.fragments = FragmentList(wanted.shape.rank());
  for (Index rank = 0; rank < request_.mesh.ranks(); ++rank) {
    if (!is_first_replica(request_.mesh, wanted.placement, rank)) continue;
    const auto boxes = owned_boxes(request_.mesh, wanted.placement, wanted.shape, rank);
    const Extent on{static_cast<std::uint32_t>(rank), 0, 0};
    if (tensor.elements() == 0 && !boxes.empty()) {  // an empty tensor is stored once, as a whole
      tensor.fragments.add(whole(wanted.shape), on);
      break;
    }
    for (const LocalBox& owned : boxes)
      if (!owned.box.empty()) tensor.fragments.add(owned.box, on);
  }
  if (tensor.fragments.empty()) return internal_error(tensor_text(wanted.name) + ": no rank of the mesh holds it");
  TRY(check_cover(tensor));
  if (cuts_.size() == kKept) cuts_.pop_front();
  cuts_.push_back({wanted.shape, wanted.placement, std::move(tensor.fragments)});
  return &cuts_.back();
}

Status DcpTarget::add_tensor(std::size_t number) {
  const TargetTensor& wanted = request_.tensors[number];
  const auto elements = checked_volume(wanted.shape);
  const auto bytes = elements ? checked_mul(*elements, byte_size(wanted.dtype)) : std::nullopt;
  const auto total = bytes ? checked_add(bytes_, *bytes) : std::nullopt;
  if (!total || *total > kMaxBytes) return unsupported(tensor_text(wanted.name) + ": 2^62 bytes or more in all");
  bytes_ = *total;
  const FragmentList& boxes = TRY(cut_of(wanted))->boxes;
  Tensor tensor;
  tensor.dtype = wanted.dtype;
  tensor.shape = wanted.shape;
  tensor.replicas = FragmentList(wanted.shape.rank());
  const std::size_t times = storing_.slices.empty() ? 1 : storing_.slices[number].size();
  for (std::size_t k = 0; k < times; ++k) {
    const Slice* const slice = storing_.slices.empty() ? nullptr : &storing_.slices[number][k];
    parts_.push_back({TRY(entry_of(number, slice)), static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(k),
                      static_cast<std::uint32_t>(around_.size())});
    FragmentList placed = boxes;
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      CatalogFile& file = catalog_.files[boxes.extent(i).file];
      const Box box = boxes.box(i);
      const auto& item = items_.of(wanted.dtype, slice ? joined(slice->at, box).shape : box.shape, file.size);
      placed.set_extent(i, {boxes.extent(i).file, file.size + item.header_bytes(), item.payload_bytes()});
      around_.push_back(TRY(kind_of({item.header_bytes(), item.trailer_bytes()})));
      file.size += item.total();
    }
    for (std::size_t i = 0; k > 0 && i < placed.size(); ++i) tensor.replicas.add(placed.box(i), placed.extent(i));
    if (k == 0) tensor.fragments = std::move(placed);
  }
  tensor.name = std::move(request_.tensors[number].name);
  return catalog_.add(std::move(tensor));
}

// Returns the items sorted by file and offset. Computes the order on first use.
const std::vector<DcpTarget::ItemNumber>& DcpTarget::in_files() const {
  std::call_once(places_found_, [this] { find_places(); });
  return in_files_;
}

void DcpTarget::find_places() const {
  std::vector<std::size_t> ends(catalog_.files.size() + 1);  // the end of each file's items; first their beginning
  ItemNumber number = 0;
  for (std::size_t e = 0; e < entries(); ++e) each_item(e, [&](const WrittenItem& item) { ++ends[item.file + 1]; });
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  in_files_.resize(ends.back());
  for (std::size_t e = 0; e < entries(); ++e)
    each_item(e, [&](const WrittenItem& item) { in_files_[ends[item.file]++] = number++; });
  if (storing_.slices.empty()) return;  // the entries are already in the order of the files
  const auto is_before = [this](ItemNumber a, ItemNumber b) { return item(a).offset < item(b).offset; };
  std::size_t begin = 0;
  for (const std::size_t end : ends) {
    const auto first = in_files_.begin() + begin;
    const auto last = in_files_.begin() + end;
    if (begin < end && !std::is_sorted(first, last, is_before)) std::sort(first, last, is_before);
    begin = std::max(begin, end);
  }
}

Status DcpTarget::seal_item(ItemNumber number, Items& items, const PayloadCrc& crc, const EmitBytes& emit) const {
  if (number < blobs_.size()) {
    const Extent& blob = blobs_[number];
    return emit(blob.file, blob.offset, as_bytes(request_.blobs[number].bytes));
  }
  const auto [part, i] = part_of(number);
  const WrittenItem written = item_of(*part, i);
  const Extent payload = payload_of(*part, i).second;
  torch_archive::Item& item = items.of(tensor_of(*part).dtype, written.box.shape, written.offset);
  item.set_crc(crc(payload));
  TRY(emit(written.file, written.offset, as_bytes(item.header())));
  return emit(written.file, payload.offset + payload.length, as_bytes(item.trailer()));
}

// Emits the part of the metadata that overlaps `place`, or all of it if null.
Status DcpTarget::seal_texts(const Extent* place, const EmitBytes& emit) const {
  std::uint32_t file = metadata_file_;
  Index at = 0;
  if (!place || place->file == file) {
    TRY(write_metadata(*this, [&](std::string_view bytes) -> Status {
      const Index begin = at;
      at += std::ssize(bytes);
      if (place && (at <= place->offset || begin >= place->offset + place->length)) return {};
      return emit(file, begin, as_bytes(bytes));
    }));
  }
  for (const auto& [name, text] : storing_.texts) TRY(emit(++file, 0, as_bytes(text)));
  return {};
}

Status DcpTarget::seal(const PayloadCrc& crc, const EmitBytes& emit) const {
  Items items;
  for (const ItemNumber number : in_files()) TRY(seal_item(number, items, crc, emit));
  return seal_texts(nullptr, emit);
}

Status DcpTarget::seal_at(const Extent& place, const PayloadCrc& crc, const EmitBytes& emit) const {
  if (place.file >= metadata_file_) return seal_texts(&place, emit);
  const auto begins_after = [this](const Extent& e, ItemNumber number) {
    const WrittenItem other = item(number);
    return std::pair(e.file, e.offset) < std::pair(other.file, other.offset);
  };
  Items items;
  auto at = std::upper_bound(in_files().begin(), in_files().end(), place, begins_after);
  if (at != in_files().begin()) --at;
  for (; at != in_files().end(); ++at) {
    const WrittenItem next = item(*at);
    if (next.file > place.file || (next.file == place.file && next.offset >= place.offset + place.length)) break;
    TRY(seal_item(*at, items, crc, emit));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) {
  TRY(rename_parameter_lists(request));
  return lay_out(std::move(request), DcpStorage());
}

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request, DcpStorage storing) {
  auto target = std::make_unique<DcpTarget>(std::move(request), std::move(storing));
  TRY(target->lay_out());
  return std::unique_ptr<Target>(std::move(target));
}

}  // namespace reshard::dcp
