#include <algorithm>
#include <deque>
#include <map>
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

class DcpTarget : public Target {
 public:
  DcpTarget(LayoutRequest request, Storing storing) : request_(std::move(request)), storing_(std::move(storing)) {}

  Status lay_out();
  bool wants_crcs() const override { return true; }
  Status seal(const PayloadCrc& crc, const EmitBytes& emit) const override;
  Status seal_at(const Extent& place, const PayloadCrc& crc, const EmitBytes& emit) const override;

 private:
  // An item of an entry.
  struct ItemPlace {
    std::uint32_t file = 0;
    Index offset = 0;
    std::size_t entry = 0, item = 0;
  };
  Status seal_item(const ItemPlace& place, const PayloadCrc& crc, const EmitBytes& emit) const;
  Status seal_texts(const EmitBytes& emit) const;
  Status add_tensor(std::size_t number);
  Result<std::size_t> entry_of(const TargetTensor& wanted, const Slice& slice);
  WrittenItem append(std::uint32_t file, Index length);
  std::uint32_t append_file(const std::string& name, Index size);

  LayoutRequest request_;
  Storing storing_;
  std::deque<TargetTensor> stored_;
  std::vector<WrittenEntry> entries_;            // blobs, then tensors, in the order of the request
  std::map<std::string, std::size_t> entry_of_;  // of stored tensors
  std::vector<ItemPlace> places_;                // by file and offset
  std::string metadata_;
  std::uint32_t metadata_file_ = 0;
  Index bytes_ = 0;  // of the tensors so far
};

std::uint32_t DcpTarget::append_file(const std::string& name, Index size) {
  catalog_.files.push_back({name, size});
  return static_cast<std::uint32_t>(catalog_.files.size() - 1);
}

WrittenItem DcpTarget::append(std::uint32_t file, Index length) {
  WrittenItem item;
  item.file = file;
  item.offset = catalog_.files[file].size;
  item.length = length;
  catalog_.files[file].size += length;
  return item;
}

Status DcpTarget::lay_out() {
  std::vector<std::string> names;
  for (Index rank = 0; rank < request_.mesh.ranks(); ++rank) {
    names.push_back("__" + std::to_string(rank) + "_0" + std::string(kDataEnding));
    append_file(storing_.directory + names.back(), 0);
  }
  for (const TargetBlob& blob : request_.blobs)
    entries_.push_back({nullptr, blob.name, blob.path, {append(0, static_cast<Index>(blob.bytes.size()))}});
  for (std::size_t i = 0; i < request_.tensors.size(); ++i) TRY(add_tensor(i));
  for (const WrittenEntry& entry : entries_)
    if (entry.tensor && !checked_volume(entry.tensor->shape))
      return unsupported(tensor_text(entry.name) + ": 2^63 elements or more");
  for (std::size_t e = 0; e < entries_.size(); ++e)
    for (std::size_t i = 0; i < entries_[e].items.size(); ++i)
      places_.push_back({entries_[e].items[i].file, entries_[e].items[i].offset, e, i});
  std::sort(places_.begin(), places_.end(), [](const ItemPlace& a, const ItemPlace& b) {
    return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
  });
  metadata_ = write_metadata(entries_, names);
  metadata_file_ = append_file(storing_.directory + std::string(kMetadataFile), std::ssize(metadata_));
  for (const auto& [name, text] : storing_.texts) append_file(name, std::ssize(text));
  return {};
}

// The entry of the tensor that holds this slice, made where there is none yet.
Result<std::size_t> DcpTarget::entry_of(const TargetTensor& wanted, const Slice& slice) {
  if (slice.counts.rank() + wanted.shape.rank() > kMaxRank)
    return unsupported(tensor_text(wanted.name) + ": would be stored with more than " + std::to_string(kMaxRank) +
                       " dimensions");
  Dims shape = slice.counts;
  for (const Index n : wanted.shape) shape.push_back(n);
  const auto [there, is_new] = entry_of_.emplace(slice.stored, entries_.size());
  if (is_new) {
    TargetTensor& stored = stored_.emplace_back(wanted);
    stored.shape = shape;
    const KeyPath path = stored.name == slice.stored ? wanted.path : KeyPath{slice.stored};
    entries_.push_back({&stored, slice.stored, path, {}});
  }
  const TargetTensor& stored = *entries_[there->second].tensor;
  if (stored.shape != shape || stored.dtype != wanted.dtype)
    return unsupported(tensor_text(wanted.name) + ": is " + std::string(info(wanted.dtype).torch_name) + " " +
                       to_string(wanted.shape) + ", and what it would be stored with as '" + slice.stored + "' is " +
                       std::string(info(stored.dtype).torch_name) + " " + to_string(stored.shape));
  return there->second;
}

Status DcpTarget::add_tensor(std::size_t number) {
  const TargetTensor& wanted = request_.tensors[number];
  const auto elements = checked_volume(wanted.shape);
  const auto bytes = elements ? checked_mul(*elements, byte_size(wanted.dtype)) : std::nullopt;
  const auto total = bytes ? checked_add(bytes_, *bytes) : std::nullopt;
  if (!total || *total > kMaxBytes) return unsupported(tensor_text(wanted.name) + ": 2^62 bytes or more in all");
  bytes_ = *total;
  Tensor tensor;
  tensor.name = wanted.name;
  tensor.dtype = wanted.dtype;
  tensor.shape = wanted.shape;
  tensor.fragments = FragmentList(wanted.shape.rank());
  tensor.replicas = FragmentList(wanted.shape.rank());
  const std::vector<Slice> itself = {{wanted.name, {}, {}}};
  for (const Slice& slice : storing_.slices.empty() ? itself : storing_.slices[number]) {
    const std::size_t e = TRY(entry_of(wanted, slice));
    FragmentList& fragments = tensor.fragments.empty() ? tensor.fragments : tensor.replicas;
    const auto add_item = [&](Index rank, const Box& box) {
      const auto file = static_cast<std::uint32_t>(rank);
      const Box item_box = joined(slice.at, box);
      const auto shape = torch_archive::item_shape(wanted.dtype, item_box.shape, catalog_.files[file].size);
      WrittenItem item = append(file, shape.total());
      item.box = item_box;
      fragments.add(box, {file, item.offset + shape.header_bytes, shape.payload_bytes});
      entries_[e].items.push_back(item);
    };
    for (Index rank = 0; rank < request_.mesh.ranks(); ++rank) {
      if (!is_first_replica(request_.mesh, wanted.placement, rank)) continue;
      const auto boxes = owned_boxes(request_.mesh, wanted.placement, wanted.shape, rank);
      if (tensor.elements() == 0 && !boxes.empty()) {  // an empty tensor is stored once, as itself
        add_item(rank, whole(wanted.shape));
        break;
      }
      for (const LocalBox& owned : boxes)
        if (!owned.box.empty()) add_item(rank, owned.box);
    }
    if (fragments.empty()) return internal_error(tensor_text(wanted.name) + ": no rank of the mesh holds it");
  }
  TRY(check_cover(tensor));
  return catalog_.add(std::move(tensor));
}

Status DcpTarget::seal_item(const ItemPlace& place, const PayloadCrc& crc, const EmitBytes& emit) const {
  const WrittenEntry& entry = entries_[place.entry];
  const WrittenItem& item = entry.items[place.item];
  if (!entry.tensor) return emit(item.file, item.offset, as_bytes(request_.blobs[place.entry].bytes));
  const DType dtype = entry.tensor->dtype;
  const auto shape = torch_archive::item_shape(dtype, item.box.shape, item.offset);
  const Extent payload{item.file, item.offset + shape.header_bytes, shape.payload_bytes};
  const std::uint32_t sum = crc(payload);
  const std::string header = torch_archive::item_header(dtype, item.box.shape, item.offset, sum);
  const std::string trailer = torch_archive::item_trailer(dtype, item.box.shape, item.offset, sum);
  TRY(emit(item.file, item.offset, as_bytes(header)));
  return emit(item.file, payload.offset + payload.length, as_bytes(trailer));
}

Status DcpTarget::seal_texts(const EmitBytes& emit) const {
  std::uint32_t file = metadata_file_;
  TRY(emit(file, 0, as_bytes(metadata_)));
  for (const auto& [name, text] : storing_.texts) TRY(emit(++file, 0, as_bytes(text)));
  return {};
}

Status DcpTarget::seal(const PayloadCrc& crc, const EmitBytes& emit) const {
  for (const ItemPlace& place : places_) TRY(seal_item(place, crc, emit));
  return seal_texts(emit);
}

Status DcpTarget::seal_at(const Extent& place, const PayloadCrc& crc, const EmitBytes& emit) const {
  if (place.file >= metadata_file_) return seal_texts(emit);
  const auto begins_after = [](const Extent& e, const ItemPlace& p) {
    return std::pair(e.file, e.offset) < std::pair(p.file, p.offset);
  };
  auto item = std::upper_bound(places_.begin(), places_.end(), place, begins_after);
  if (item != places_.begin()) --item;
  for (; item != places_.end() && item->file <= place.file && item->offset < place.offset + place.length; ++item)
    TRY(seal_item(*item, crc, emit));
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
