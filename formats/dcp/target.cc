#include <algorithm>
#include <deque>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>

#include "formats/dcp/dcp.h"
#include "formats/dcp/metadata.h"
#include "formats/encoding/torch_archive.h"
#include "lib/base/text.h"

namespace reshard::dcp {
namespace {

constexpr Index kMaxBytes = Index{1} << 62;  // of all tensors: with the archives around them below 2^63

Box joined(const Dims& at, const Box& box) {
  Box out{at, Dims::filled(at.rank(), 1)};
  for (int d = 0; d < box.rank(); ++d) {
    out.origin.push_back(box.origin[d]);
    out.shape.push_back(box.shape[d]);
  }
  return out;
}

// How tensors of one shape and placement lie on the mesh.
struct Cut {
  Dims shape;
  Placement placement;
  FragmentList boxes;  // extents say the rank, as the file, and no more
};

// Items one after the other: most are as the last one was.
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
  std::optional<torch_archive::Item> last_;  // of these
  DType dtype_ = DType::kFloat32;
  Dims shape_;
  Index phase_ = 0;
};

// What is known of each item is in the catalog's fragments, but for the lengths around it: a large job has millions.
class DcpTarget : public Target, private MetadataContents {
 public:
  DcpTarget(LayoutRequest request, Storing storing) : request_(std::move(request)), storing_(std::move(storing)) {}

  Status lay_out();
  bool wants_crcs() const override { return true; }
  Status seal(const PayloadCrc& crc, const EmitBytes& emit) const override;
  Status seal_at(const Extent& place, const PayloadCrc& crc, const EmitBytes& emit) const override;

 private:
  // Bytes before and after an item's payload. Items have few kinds of them.
  struct Around {
    Index header = 0, trailer = 0;
    friend bool operator==(const Around&, const Around&) = default;
  };
  // Items of an entry that are one slice of a tensor: some of its fragments or of its replicas.
  struct Part {
    std::uint32_t tensor = 0;
    std::uint32_t first = 0, count = 0;  // among them
    bool is_replica = false;
    const Slice* slice = nullptr;  // null: the tensor itself
    std::size_t around = 0;        // of the first item, in around_
  };
  // An entry of tensors.
  struct Stored {
    std::uint32_t tensor = 0;  // the first that it holds
    const Slice* slice = nullptr;
    std::vector<Part> parts;
  };
  // An item: which of all items, in the order of the entries.
  using ItemNumber = std::uint32_t;

  // Entries are the blobs, then what is stored of tensors.
  std::size_t entries() const override { return blobs_.size() + stored_.size(); }
  Entry entry(std::size_t e) const override;
  void each_item(std::size_t e, const VisitItem& visit) const override;
  std::string_view file(std::uint32_t number) const override;

  const FragmentList& list_of(const Part& part) const;
  WrittenItem item_of(const Part& part, std::uint32_t i) const;
  WrittenItem item(ItemNumber number) const;
  std::pair<const Part*, std::uint32_t> part_of(ItemNumber number) const;
  // Of an entry, once all is laid out.
  const Tensor& first_of(const Stored& stored) const { return catalog_.tensors()[stored.tensor]; }
  const std::string& name_of(const Stored& stored) const;
  // That a tensor of this shape is stored with.
  static Dims stored_shape(const Slice* slice, const Dims& shape);
  const std::vector<ItemNumber>& in_files() const;
  void find_places() const;
  Status seal_item(ItemNumber number, Items& items, const PayloadCrc& crc, const EmitBytes& emit) const;
  Status seal_texts(const Extent* place, const EmitBytes& emit) const;
  Status add_tensor(std::size_t number);
  Result<const Cut*> cut_of(const TargetTensor& wanted);
  Result<Stored*> stored_of(std::size_t number, const Slice* slice);
  Result<std::uint16_t> kind_of(const Around& around);
  std::uint32_t append_file(const std::string& name, Index size);

  LayoutRequest request_;  // its tensors are in the catalog once all is laid out
  Storing storing_;
  std::vector<Extent> blobs_;
  std::vector<Stored> stored_;
  std::map<std::string, std::size_t> stored_of_;  // by name, where there are slices
  std::vector<Around> kinds_;
  std::vector<std::uint16_t> around_;  // of each item, among kinds_
  std::deque<Cut> cuts_;               // of the last tensors
  Items items_;                        // as they are laid out
  std::uint32_t metadata_file_ = 0;
  Index bytes_ = 0;  // of the tensors so far
  mutable std::once_flag places_found_;
  mutable std::vector<ItemNumber> first_;     // of each entry
  mutable std::vector<ItemNumber> in_files_;  // all, by file and offset
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
  if (storing_.slices.empty()) stored_.reserve(request_.tensors.size());
  for (std::size_t i = 0; i < request_.tensors.size(); ++i) TRY(add_tensor(i));
  around_.shrink_to_fit();
  cuts_.clear();
  for (std::size_t i = 0; i < request_.tensors.size(); ++i)
    catalog_.tensor(i).path = std::move(request_.tensors[i].path);
  request_.tensors = std::vector<TargetTensor>();  // and its memory
  for (const Stored& stored : stored_)
    if (!checked_volume(stored_shape(stored.slice, first_of(stored).shape)))
      return unsupported(tensor_text(name_of(stored)) + ": 2^63 elements or more");
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

const std::string& DcpTarget::name_of(const Stored& stored) const {
  return stored.slice ? stored.slice->stored : first_of(stored).name;
}

Dims DcpTarget::stored_shape(const Slice* slice, const Dims& shape) {
  Dims out = slice ? slice->counts : Dims();
  for (const Index n : shape) out.push_back(n);
  return out;
}

DcpTarget::Entry DcpTarget::entry(std::size_t e) const {
  if (e < blobs_.size()) return {request_.blobs[e].name, request_.blobs[e].path, std::nullopt, {}};
  const Stored& stored = stored_[e - blobs_.size()];
  const Tensor& first = first_of(stored);
  const std::string& name = name_of(stored);
  return {name, first.name == name ? first.path : KeyPath{name}, first.dtype, stored_shape(stored.slice, first.shape)};
}

const FragmentList& DcpTarget::list_of(const Part& part) const {
  const Tensor& tensor = catalog_.tensors()[part.tensor];
  return part.is_replica ? tensor.replicas : tensor.fragments;
}

// The i-th of a part.
WrittenItem DcpTarget::item_of(const Part& part, std::uint32_t i) const {
  const FragmentList& list = list_of(part);
  const Extent payload = list.extent(part.first + i);
  const Around& around = kinds_[around_[part.around + i]];
  const Box box = list.box(part.first + i);
  return {part.slice ? joined(part.slice->at, box) : box, payload.file, payload.offset - around.header,
          payload.length + around.header + around.trailer};
}

WrittenItem DcpTarget::item(ItemNumber number) const {
  if (number < blobs_.size()) {  // the first entries, of an item each
    const Extent& blob = blobs_[number];
    return {Box{}, blob.file, blob.offset, blob.length};
  }
  const auto [part, i] = part_of(number);
  return item_of(*part, i);
}

// Of one that is no blob's, once the first of each entry are known: the part, and which of its items.
std::pair<const DcpTarget::Part*, std::uint32_t> DcpTarget::part_of(ItemNumber number) const {
  const auto entry = std::prev(std::upper_bound(first_.begin(), first_.end(), number)) - first_.begin();
  std::uint32_t i = number - first_[static_cast<std::size_t>(entry)];
  const Part* part = stored_[static_cast<std::size_t>(entry) - blobs_.size()].parts.data();
  for (; i >= part->count; ++part) i -= part->count;
  return {part, i};
}

void DcpTarget::each_item(std::size_t e, const VisitItem& visit) const {
  if (e < blobs_.size()) return visit(item(static_cast<ItemNumber>(e)));
  for (const Part& part : stored_[e - blobs_.size()].parts)
    for (std::uint32_t i = 0; i < part.count; ++i) visit(item_of(part, i));
}

// The entry of the tensor that holds this slice (null: of the tensor itself), made where there is none yet.
Result<DcpTarget::Stored*> DcpTarget::stored_of(std::size_t number, const Slice* slice) {
  const TargetTensor& wanted = request_.tensors[number];
  if ((slice ? slice->counts.rank() : 0) + wanted.shape.rank() > kMaxRank)
    return unsupported(tensor_text(wanted.name) + ": would be stored with more than " + std::to_string(kMaxRank) +
                       " dimensions");
  const Stored made{static_cast<std::uint32_t>(number), slice, {}};
  if (slice) {
    const auto [there, is_new] = stored_of_.emplace(slice->stored, stored_.size());
    if (!is_new) {
      Stored& stored = stored_[there->second];
      const TargetTensor& first = request_.tensors[stored.tensor];
      const Dims shape = stored_shape(slice, wanted.shape), known = stored_shape(stored.slice, first.shape);
      if (known == shape && first.dtype == wanted.dtype) return &stored;
      return unsupported(tensor_text(wanted.name) + ": is " + std::string(info(wanted.dtype).torch_name) + " " +
                         to_string(wanted.shape) + ", and what it would be stored with as '" + slice->stored + "' is " +
                         std::string(info(first.dtype).torch_name) + " " + to_string(known));
    }
  }
  return &stored_.emplace_back(made);
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
  constexpr std::size_t kKept = 32;  // more kinds of parameters than a layer has
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
    if (tensor.elements() == 0 && !boxes.empty()) {  // an empty tensor is stored once, as itself
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
    Stored* const stored = TRY(stored_of(number, slice));
    FragmentList placed = boxes;
    Part part{
        static_cast<std::uint32_t>(number), 0, static_cast<std::uint32_t>(boxes.size()), k > 0, slice, around_.size()};
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      CatalogFile& file = catalog_.files[boxes.extent(i).file];
      const Box box = boxes.box(i);
      const auto& item = items_.of(wanted.dtype, slice ? joined(slice->at, box).shape : box.shape, file.size);
      placed.set_extent(i, {boxes.extent(i).file, file.size + item.header_bytes(), item.payload_bytes()});
      around_.push_back(TRY(kind_of({item.header_bytes(), item.trailer_bytes()})));
      file.size += item.total();
    }
    part.first = static_cast<std::uint32_t>(k == 0 ? 0 : tensor.replicas.size());
    stored->parts.push_back(part);
    for (std::size_t i = 0; k > 0 && i < placed.size(); ++i) tensor.replicas.add(placed.box(i), placed.extent(i));
    if (k == 0) tensor.fragments = std::move(placed);
  }
  tensor.name = std::move(request_.tensors[number].name);
  return catalog_.add(std::move(tensor));
}

// Items in the order of the files, for who goes through these.
const std::vector<DcpTarget::ItemNumber>& DcpTarget::in_files() const {
  std::call_once(places_found_, [this] { find_places(); });
  return in_files_;
}

void DcpTarget::find_places() const {
  std::vector<std::size_t> ends(catalog_.files.size() + 1);  // of each file's items; at first where they begin
  ItemNumber number = 0;
  first_.clear();  // of an attempt that there was no memory for
  for (std::size_t e = 0; e < entries(); ++e) {
    first_.push_back(number);
    each_item(e, [&](const WrittenItem& item) { ++ends[item.file + 1], ++number; });
  }
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  in_files_.resize(ends.back());
  number = 0;
  for (std::size_t e = 0; e < entries(); ++e)
    each_item(e, [&](const WrittenItem& item) { in_files_[ends[item.file]++] = number++; });
  if (storing_.slices.empty()) return;  // entries were made in the order of the files
  const auto is_before = [this](ItemNumber a, ItemNumber b) { return item(a).offset < item(b).offset; };
  std::size_t begin = 0;
  for (const std::size_t end : ends) {
    const auto first = in_files_.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = in_files_.begin() + static_cast<std::ptrdiff_t>(end);
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
  const Extent payload = list_of(*part).extent(part->first + i);
  const DType dtype = catalog_.tensors()[part->tensor].dtype;
  torch_archive::Item& item = items.of(dtype, written.box.shape, written.offset);
  item.set_crc(crc(payload));
  TRY(emit(written.file, written.offset, as_bytes(item.header())));
  return emit(written.file, payload.offset + payload.length, as_bytes(item.trailer()));
}

// Of the metadata what lies at `place`; null: all of it.
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

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) { return lay_out(std::move(request), Storing()); }

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request, Storing storing) {
  auto target = std::make_unique<DcpTarget>(std::move(request), std::move(storing));
  TRY(target->lay_out());
  return std::unique_ptr<Target>(std::move(target));
}

}  // namespace reshard::dcp
