#include "tests/formats/toy/toy.h"

#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::string_view kIndex = "toy.json", kData = "toy.data";
constexpr Index kMaxIndexBytes = Index{1} << 30;

class ToyReader : public Reader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options) {
    catalog_.root = place.path();
    catalog_.metadata_files.emplace_back(kIndex);
    const std::string index = path_join(catalog_.root, kIndex);
    const Json json = TRY(parse_json(TRY(read_whole_file(index, kMaxIndexBytes)), index));
    const auto data = files_.open(path_join(catalog_.root, kData));
    catalog_.files = {{std::string(kData), data ? TRY((*data)->size()) : -1}};
    for (const Json::Member& m : TRY(json.as_object().context(index)))
      TRY(add(m.key, m.value).context(index + ": tensor '" + printable(m.key) + "'"));
    catalog_.sort_by_name();
    catalog_.attributes.emplace_back("format", "toy, " + count_of(std::ssize(catalog_.tensors()), "tensor"));
    if (!options.validated) return {};
    TRY(validate(catalog_, options.files_too));
    return check_extents_disjoint(catalog_, SharedExtents::kRefused);
  }

  Status locate(const std::vector<std::size_t>&, int, const std::string&) override { return {}; }
  Result<std::string> blob_bytes(const Blob& blob) override {
    return internal_error("toys hold tensors only: asked for '" + printable(blob.name) + "'");
  }
  std::string describe(const Blob&) override { return ""; }

 private:
  Status add(const std::string& name, const Json& json) {
    Tensor tensor;
    tensor.name = name;
    const auto dtype = dtype_from_torch(TRY(json.get_string("dtype")));
    if (!dtype) return corrupt("dtype: expected one of torch's, got another");
    tensor.dtype = *dtype;
    for (const Json& extent : TRY(json.get_array("shape"))) {
      if (tensor.shape.rank() == kMaxRank)
        return corrupt("shape: expected at most " + std::to_string(kMaxRank) + " dimensions");
      tensor.shape.push_back(TRY(extent.as_index()));
      if (tensor.shape[tensor.shape.rank() - 1] < 0) return corrupt("shape: expected no negative extent");
    }
    const auto elements = checked_volume(tensor.shape);
    const auto bytes = elements ? checked_mul(*elements, byte_size(*dtype)) : std::nullopt;
    const Index offset = TRY(json.get_index("offset"));
    if (!bytes || offset < 0 || !checked_add(offset, *bytes)) return corrupt("expected a place below 2^63 bytes");
    tensor.fragments = FragmentList(tensor.shape.rank());
    tensor.fragments.add(whole(tensor.shape), {0, offset, *bytes});
    return catalog_.add(std::move(tensor));
  }
};

class ToyTarget : public Target {
 public:
  Status lay_out(const LayoutRequest& request) {
    if (request.mesh.ranks() != 1)
      return unsupported("toys are for one rank: got a mesh of " + request.mesh.to_string());
    Json index = Json::object();
    Index end = 0;
    for (const TargetTensor& t : request.tensors) {
      Tensor tensor;
      tensor.name = t.name;
      tensor.dtype = t.dtype;
      tensor.shape = t.shape;
      const auto elements = checked_volume(t.shape);
      const auto bytes = elements ? checked_mul(*elements, byte_size(t.dtype)) : std::nullopt;
      const auto next = bytes ? checked_add(end, *bytes) : std::nullopt;
      if (!next) return unsupported("tensor '" + printable(t.name) + "': 2^63 bytes or more");
      tensor.fragments = FragmentList(t.shape.rank());
      tensor.fragments.add(whole(t.shape), {0, end, *bytes});
      TRY(catalog_.add(std::move(tensor)));
      Json shape = Json::array();
      for (const Index extent : t.shape) shape.push_back(extent);
      index.set(t.name, Json::object().set("dtype", info(t.dtype).torch_name).set("shape", shape).set("offset", end));
      end = *next;
    }
    index_ = to_text(index, 1) + "\n";
    catalog_.files = {{std::string(kData), end}, {std::string(kIndex), std::ssize(index_)}};
    return {};
  }
  bool wants_crcs() const override { return false; }
  Status seal(const PayloadCrc&, const EmitBytes& emit) const override { return emit(1, 0, as_bytes(index_)); }

 private:
  std::string index_;
};

}  // namespace

const Format kToyFormat = {
    .name = "toy",
    .title = "toys",
    .recognises = [](const PathSnapshot& place) -> Result<bool> { return place.has_file(kIndex); },
    .open = open_as<ToyReader>,
    .lay_out = [](LayoutRequest request) -> Result<std::unique_ptr<Target>> {
      auto target = std::make_unique<ToyTarget>();
      TRY(target->lay_out(request));
      return std::unique_ptr<Target>(std::move(target));
    },
    .holds = StateSupport::kTensors,
};

}  // namespace reshard
