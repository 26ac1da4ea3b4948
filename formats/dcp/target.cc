#include "formats/dcp/dcp.h"
#include "formats/dcp/metadata.h"
#include "formats/encoding/torch_archive.h"
#include "lib/base/text.h"

namespace reshard::dcp {
namespace {

constexpr Index kMaxBytes = Index{1} << 62;  // of all tensors: with the archives around them below 2^63

class DcpTarget : public Target {
 public:
  explicit DcpTarget(LayoutRequest request) : request_(std::move(request)) {}

  Status lay_out();
  bool wants_crcs() const override { return true; }
  Status seal(const PayloadCrc& crc, const EmitBytes& emit) const override;

 private:
  Status add_tensor(const TargetTensor& wanted);
  WrittenItem append(std::uint32_t file, Index length);

  LayoutRequest request_;
  std::vector<WrittenEntry> entries_;  // blobs, then tensors, in the order of the request
  std::string metadata_;
  Index bytes_ = 0;  // of the tensors so far
};

WrittenItem DcpTarget::append(std::uint32_t file, Index length) {
  WrittenItem item;
  item.file = file;
  item.offset = catalog_.files[file].size;
  item.length = length;
  catalog_.files[file].size += length;
  return item;
}

Status DcpTarget::lay_out() {
  for (Index rank = 0; rank < request_.mesh.ranks(); ++rank)
    catalog_.files.push_back({"__" + std::to_string(rank) + "_0" + std::string(kDataEnding), 0});
  for (const TargetBlob& blob : request_.blobs)
    entries_.push_back({nullptr, blob.name, blob.path, {append(0, static_cast<Index>(blob.bytes.size()))}});
  for (const TargetTensor& tensor : request_.tensors) TRY(add_tensor(tensor));

  std::vector<std::string> names;
  for (const CatalogFile& file : catalog_.files) names.push_back(file.path);
  metadata_ = write_metadata(entries_, names);
  catalog_.files.push_back({std::string(kMetadataFile), static_cast<Index>(metadata_.size())});
  return {};
}

Status DcpTarget::add_tensor(const TargetTensor& wanted) {
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
  WrittenEntry entry{&wanted, wanted.name, wanted.path, {}};
  const auto add_item = [&](Index rank, const Box& box) {
    const auto file = static_cast<std::uint32_t>(rank);
    const auto shape = torch_archive::item_shape(wanted.dtype, box.shape, catalog_.files[file].size);
    WrittenItem item = append(file, shape.total());
    item.box = box;
    Fragment f;
    f.box = box;
    f.strides = row_major_strides(box.shape);
    f.extent = {file, item.offset + shape.header_bytes, shape.payload_bytes};
    tensor.fragments.add(f);
    entry.items.push_back(item);
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
  if (entry.items.empty()) return internal_error(tensor_text(wanted.name) + ": no rank of the mesh holds it");
  TRY(check_cover(tensor));
  entries_.push_back(std::move(entry));
  return catalog_.add(std::move(tensor));
}

Status DcpTarget::seal(const PayloadCrc& crc, const EmitBytes& emit) const {
  std::size_t blob = 0;
  for (const WrittenEntry& entry : entries_) {
    if (!entry.tensor) {
      TRY(emit(0, entry.items[0].offset, as_bytes(request_.blobs[blob++].bytes)));
      continue;
    }
    const DType dtype = entry.tensor->dtype;
    for (const WrittenItem& item : entry.items) {
      const auto shape = torch_archive::item_shape(dtype, item.box.shape, item.offset);
      const Extent payload{item.file, item.offset + shape.header_bytes, shape.payload_bytes};
      const std::uint32_t sum = crc(payload);
      const std::string header = torch_archive::item_header(dtype, item.box.shape, item.offset, sum);
      const std::string trailer = torch_archive::item_trailer(dtype, item.box.shape, item.offset, sum);
      TRY(emit(item.file, item.offset, as_bytes(header)));
      TRY(emit(item.file, payload.offset + payload.length, as_bytes(trailer)));
    }
  }
  return emit(static_cast<std::uint32_t>(catalog_.files.size() - 1), 0, as_bytes(metadata_));
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) {
  auto target = std::make_unique<DcpTarget>(std::move(request));
  TRY(target->lay_out());
  return std::unique_ptr<Target>(std::move(target));
}

}  // namespace reshard::dcp
