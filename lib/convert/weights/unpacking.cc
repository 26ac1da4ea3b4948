// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/unpacking.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "lib/base/io_failure_watch.h"
#include "lib/base/names.h"
#include "lib/base/storage/read_ahead.h"
#include "lib/base/text.h"
#include "lib/device/convert.h"
#include "lib/device/copy.h"
#include "lib/model/packed_layouts.h"
#include "lib/model/parts.h"
#include "lib/model/transposed_weights.h"

namespace reshard {
namespace {

constexpr Index kKeptBytes = Index{32} << 20;  // of packed values that are remembered, of all weights
constexpr Index kMaxSmall = Index{1} << 20;    // bytes of a tensor that is read to know a weight's shape
constexpr std::string_view kFile = "(unpacked weights)";
constexpr std::string_view kQuantizationConfigs[] = {"quantization_config", "compression_config"};

// Returns a config.json without its quantization_config, in nested configs too, and sets `taken` to the first one.
Json take_quantization(const Json& config, Json& taken) {
  Json out = Json::object();
  const std::span<const Json::Member> members = *config.as_object();
  for (const Json::Member& m : members) {
    if (std::find(std::begin(kQuantizationConfigs), std::end(kQuantizationConfigs), m.key) !=
        std::end(kQuantizationConfigs)) {
      if (taken.is_null()) taken = m.value;
    } else {
      out.set(m.key, m.key.ends_with("_config") && m.value.is_object() ? take_quantization(m.value, taken) : m.value);
    }
  }
  return out;
}

// Returns the stored name of `weight`, which contains the tensor `part`: with its wrapper's prefix.
std::string stored_name(const Tensor& part, const std::string& weight) {
  if (part.plain_key.empty()) return weight;
  const std::string_view module = module_of(weight);
  const std::string_view leaf = std::string_view(part.plain_key).substr(std::min(module.size(), part.plain_key.size()));
  if (!part.name.ends_with(leaf)) return weight;
  return part.name.substr(0, part.name.size() - leaf.size()) + weight.substr(module.size());
}

// Reads small tensors of an open checkpoint whole.
class SmallReader {
 public:
  SmallReader(Reader& reader, std::string spool, int threads)
      : reader_(reader), spool_(std::move(spool)), threads_(threads) {}

  Result<std::vector<std::byte>> read(std::size_t tensor) {
    const Tensor& t = reader_.catalog().tensors()[tensor];
    if (t.bytes() > kMaxSmall)
      return corrupt(reader_.catalog().where() + ": " + tensor_text(t.name) + " " + to_string(t.shape) +
                     ": expected a small tensor that describes a packed weight");
    TRY(reader_.locate({tensor}, threads_, spool_));
    FileSource source(reader_.catalog(), reader_.files());
    std::vector<std::byte> out(t.bytes()), scratch(std::size_t{1} << 16);
    TRY(source.read(tensor, whole(t.shape), out, scratch));
    return out;
  }

 private:
  Reader& reader_;
  const std::string spool_;
  const int threads_;
};

// Returns whether other code dequantizes this layout: quantizations.h.
bool is_unpacked_elsewhere(Packing packing) { return packing == Packing::kFloat8 || packing == Packing::kMxfp4; }

bool stays(const Catalog& source, const PackedWeight& weight, const DtypeOptions& typing) {
  return typing.keeps(weight.name, weight.name) ||
         std::any_of(weight.parts.begin(), weight.parts.end(), [&](const PackedTensor& part) {
           const Tensor& t = source.tensors()[part.tensor];
           return typing.keeps(t.name, t.key());
         });
}

// Returns whether all weights stay packed. Fails (usage) if only some do.
Result<bool> stay(const Catalog& source, const PackedWeights& packed, const DtypeOptions& typing) {
  const PackedWeight *kept = nullptr, *unpacked = nullptr;
  for (const PackedWeight& w : packed.weights) (stays(source, w, typing) ? kept : unpacked) = &w;
  if (!kept || !unpacked) return kept != nullptr;
  return usage_error("--keep-dtype: '" + printable(kept->name) + "' would stay packed next to '" +
                     printable(unpacked->name) + "', which would not; config.json cannot express that");
}

Status check_complete(const Catalog& source, const PackedWeight& weight) {
  if (weight.missing.empty()) return {};
  return corrupt(source.where() + ": '" + printable(weight.name) + "' is packed as " +
                 std::string(packing_title(weight.packing)) + ", and '" + printable(weight.missing.front()) +
                 "' is missing");
}

Status check_understood(const Catalog& source, const PackedWeights& packed) {
  const std::vector<std::size_t> unknown = unknown_beside(source, packed);
  if (unknown.empty()) return {};
  return unsupported(source.where() + ": " + tensor_text(source.tensors()[unknown.front()].name) +
                     " is next to a packed weight, and it is not known whether it changes the weight's values; drop "
                     "--dtype to keep the weights packed");
}

// Returns the error for a model that rotates activations as it runs (SpinQuant's R3 and R4, QuIP). Its stored weights
// are rotated the other way, and loaders of a plain model would not know.
Error rotates_activations(const std::string& root, const ModelConfig& config) {
  return unsupported(root + ": its weights are correct only with the rotation of activations that group '" +
                     printable(config.online_transform) + "' of transform_config in " + config.path +
                     " describes, which a plain model does not apply; drop --dtype to keep the weights packed");
}

// Returns whether the plain model stores a weight [in, out], whose packed values are [out, in]. Fails (usage) if its
// name leaves that open and there is no config.
Result<bool> is_plain_transposed(const Catalog& source, const std::string& weight,
                                 const std::optional<ModelConfig>& config) {
  if (config || !may_be_stored_transposed(weight)) return config && is_stored_transposed(nullptr, &*config, weight);
  return usage_error(source.where() + ": '" + printable(weight) +
                     "': GPT-2 and others store a weight of this name [in, out] when it is not packed, most models " +
                     "[out, in]; pass --config config.json");
}

}  // namespace

Result<std::unique_ptr<Unpacking>> Unpacking::make(Reader& source, const Request& wanted, int threads,
                                                   ConfigFile& config, ConversionNotes& notes) {
  const DtypeOptions& typing = wanted.typing;
  const bool is_asked = typing.dtype && byte_size(*typing.dtype) > 1 && typing.quantize == Quantization::kNone;
  if (!is_asked && !wanted.selection.merge_adapter) return std::unique_ptr<Unpacking>();
  const Catalog& stored = source.catalog();
  std::optional<ModelConfig> model;
  if (config.is_there())
    if (auto parsed = config.model()) model = *std::move(parsed);
  const PackedWeights packed = find_packed(stored, model ? &*model : nullptr);
  const bool is_rotated = model && !model->online_transform.empty() && !packed.empty();
  if (is_asked && is_rotated && !TRY(stay(stored, packed, typing))) return rotates_activations(stored.root, *model);
  const bool is_known = std::any_of(packed.weights.begin(), packed.weights.end(),
                                    [](const PackedWeight& w) { return can_unpack(w.packing); });
  if (!is_known || TRY(stay(stored, packed, typing))) return std::unique_ptr<Unpacking>();
  if (!is_asked)
    return usage_error(stored.where() + ": " + packed_text(packed) +
                       ": adapters can be merged only into plain weights; add --dtype bfloat16 to unpack them");
  TRY(check_understood(stored, packed));
  Json plain, quantization;
  if (config.is_there())
    if (const auto json = parse_json(config.text, config.path); json && json->is_object())
      plain = take_quantization(*json, quantization);
  SmallReader small(source, wanted.spool, threads);
  const auto cache = std::make_shared<SlabCache>(kKeptBytes);
  std::unordered_map<std::size_t, const PackedWeight*> first_parts;
  for (const PackedWeight& w : packed.weights)
    if (!w.parts.empty() && !is_unpacked_elsewhere(w.packing)) first_parts.emplace(w.parts.front().tensor, &w);
  std::unique_ptr<Unpacking> out(new Unpacking());
  out->catalog_ = stored;
  out->catalog_.share_tensors(Catalog());
  out->file_ = static_cast<std::uint32_t>(stored.files.size());
  out->catalog_.files.push_back({std::string(kFile), 0});
  TRY(out->catalog_.reserve(stored.tensors().size()));
  OmittedState applied{"tensors of " + packed_text(packed) + ", unpacked", 0, 0, 0};
  for (std::size_t i = 0; i < stored.tensors().size(); ++i) {
    const Tensor& t = stored.tensors()[i];
    const PackedWeight* const weight = packed.of(i);
    if (!packed.is_of(i) || (weight && is_unpacked_elsewhere(weight->packing))) {
      TRY(out->add(t, nullptr, {i}, t.dtype));
      continue;
    }
    ++applied.tensors;
    applied.bytes += t.bytes();
    const auto first = first_parts.find(i);
    if (first == first_parts.end()) continue;
    const PackedWeight& w = *first->second;
    TRY(check_complete(stored, w));
    const PackedInput in{stored, w, quantization, [&](std::size_t tensor) { return small.read(tensor); }, cache};
    Tensor made;
    made.name = stored_name(t, w.name);
    if (made.name != w.name) made.plain_key = w.name;
    std::vector<std::size_t> parts;
    for (const PackedTensor& part : w.parts) parts.push_back(part.tensor);
    const bool is_transposed = TRY(is_plain_transposed(stored, w.name, model));
    std::unique_ptr<PackedMatrix> matrix = TRY(open_packed(in));
    if (is_transposed && matrix->shape().rank() == 2) matrix = transposed(std::move(matrix));
    TRY(out->add(std::move(made), std::move(matrix), std::move(parts), *typing.dtype));
  }
  // Find the wrapper's prefix again: it depends on the names of all parameters, some of which exist only now.
  out->catalog_.parts.clear();
  TRY(find_parts(out->catalog_, {}, stored.has_model_names, wanted.model.families));
  // quantization_config also describes the weights that are dequantized later; it is removed with their scales.
  const bool is_plain = std::none_of(packed.weights.begin(), packed.weights.end(),
                                     [](const PackedWeight& w) { return is_unpacked_elsewhere(w.packing); });
  if (is_plain && !plain.is_null() && !quantization.is_null()) config.text = python_text(plain);
  notes.left_out.push_back(std::move(applied));
  return out;
}

Status Unpacking::add(Tensor like, std::unique_ptr<PackedMatrix> matrix, std::vector<std::size_t> parts, DType dtype) {
  if (matrix) {
    like.dtype = dtype;
    like.shape = matrix->shape();
    CatalogFile& file = catalog_.files[file_];
    const auto elements = checked_volume(like.shape);
    const auto bytes = elements ? checked_mul(*elements, byte_size(dtype)) : std::nullopt;
    const auto end = bytes ? checked_add(file.size, *bytes) : std::nullopt;
    if (!end)
      return corrupt(catalog_.where() + ": " + tensor_text(like.name) + ": " + to_string(like.shape) + " is too large");
    like.fragments = like.replicas = FragmentList(like.shape.rank());
    if (*bytes > 0) {
      like.fragments.add(whole(like.shape), {file_, file.size, *bytes});
      worker_bytes_ = std::max(worker_bytes_, matrix->worker_bytes());
      weights_.push_back({std::move(matrix), dtype, file.size});
    }
    file.size = *end;
  }
  is_computed_.push_back(parts.size() != 1 || like.fragments.empty() || like.fragments.extent(0).file == file_);
  sources_.push_back(std::move(parts));
  return catalog_.add(std::move(like));
}

std::vector<std::size_t> Unpacking::operands(const std::vector<std::size_t>& tensors) const {
  std::vector<std::size_t> out;
  for (const std::size_t i : tensors) out.insert(out.end(), sources_[i].begin(), sources_[i].end());
  std::sort(out.begin(), out.end());
  return out;
}

void Unpacking::update(const Catalog& source) {
  for (std::size_t i = 0; i < sources_.size(); ++i)
    if (!is_computed_[i]) {
      Tensor& t = catalog_.tensor(i);
      std::string key = std::move(t.plain_key);
      t = source.tensors()[sources_[i].front()];
      t.plain_key = std::move(key);
    }
}

const Unpacking::Weight& Unpacking::at(Index offset) const {
  const auto after =
      std::upper_bound(weights_.begin(), weights_.end(), offset, [](Index o, const Weight& w) { return o < w.offset; });
  return *std::prev(after);
}

namespace {

// Returns the offset of `inner`, a box in `outer`, among the row-major elements of `outer`.
Index place_in(const Box& outer, const Dims& strides, const Dims& origin) {
  Index out = 0;
  for (int d = 0; d < outer.rank(); ++d) out += (origin[d] - outer.origin[d]) * strides[d];
  return out;
}

}  // namespace

// A view may have reordered rows of a weight, so a part is filled one run of rows at a time, or at once if its rows are
// consecutive in the weight.
Status Unpacking::fill_fragment(TensorSource& packed, const Tensor& tensor, const Fragment& fragment, const Box& part,
                                const Box& box, MutableBytes out, MutableBytes scratch) const {
  const Weight& weight = at(fragment.extent.offset);
  const Index width = byte_size(weight.dtype), columns = std::max<Index>(1, weight.matrix->columns());
  const int rank = part.rank();
  const Index first = fragment.start / width + place_in(fragment.box, fragment.strides, part.origin);
  const Dims strides = row_major_strides(box.shape);
  const Index run = rank == 0 ? 1 : part.shape[rank - 1];
  const bool has_rows = rank >= 2 && fragment.strides[rank - 2] == columns;
  const Index rows = has_rows ? part.shape[rank - 2] : 1;
  if (rank > 0 && run > 1 && fragment.strides[rank - 1] != 1)
    return unsupported(
        catalog_.where() + ": " + tensor_text(tensor.name) +
        ": a packed weight cannot be transposed while it is unpacked; convert it with --names keep first");
  Dims index = part.origin;
  std::vector<std::byte> block;
  while (true) {
    const Index element = first + place_in(part, fragment.strides, index);
    const Box from{{element / columns, element % columns}, {rows, run}};
    std::byte* const to = out.data() + place_in(box, strides, index) * width;
    if (rows == 1 || run == box.shape[rank - 1]) {
      TRY(unpack(*weight.matrix, packed, weight.dtype, from, {to, static_cast<std::size_t>(rows * run * width)},
                 scratch));
    } else {
      block.resize(rows * run * width);
      TRY(unpack(*weight.matrix, packed, weight.dtype, from, block, scratch));
      copy_box({rows, run}, width, block.data(), {run, 1}, to, {strides[rank - 2], 1});
    }
    int d = rank - (has_rows ? 3 : 2);
    for (; d >= 0; --d) {
      if (++index[d] < part.origin[d] + part.shape[d]) break;
      index[d] = part.origin[d];
    }
    if (d < 0) return {};
  }
}

Status Unpacking::fill(TensorSource& packed, TensorSource& stored, const Tensor& tensor, std::size_t number,
                       const Box& box, MutableBytes out, MutableBytes scratch) const {
  if (box.empty()) return {};
  const Dims strides = row_major_strides(box.shape);
  for (std::size_t i = 0; i < tensor.fragments.size(); ++i) {
    const Box part = intersect(tensor.fragments.box(i), box);
    if (part.empty()) continue;
    if (tensor.fragments.extent(i).file == file_) {
      TRY(fill_fragment(packed, tensor, tensor.fragments.get(i), part, box, out, scratch));
      continue;
    }
    const Index width = byte_size(tensor.dtype);
    std::vector<std::byte> rows(volume(part) * width);
    TRY(stored.read(number, part, rows, scratch));
    copy_box(part.shape, width, rows.data(), row_major_strides(part.shape),
             out.data() + place_in(box, strides, part.origin) * width, strides);
  }
  return {};
}

bool Unpacking::is_unpacked(const Tensor& tensor) const {
  for (std::size_t f = 0; f < tensor.fragments.size(); ++f)
    if (tensor.fragments.extent(f).file == file_) return true;
  return false;
}

void Unpacking::note_computed(SourceView& view) const {
  const auto& tensors = view.catalog.tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (is_unpacked(tensors[i])) view.computed.insert(i);
}

void Unpacking::set(TensorSource& packed, TensorSource& stored, ComputedSource& computed) const {
  const auto& tensors = computed.catalog().tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (is_unpacked(tensors[i]))
      computed.set(
          i, [this, &packed, &stored, &tensor = tensors[i], i](const Box& box, MutableBytes out, MutableBytes scratch) {
            return fill(packed, stored, tensor, i, box, out, scratch);
          });
}

namespace {

// As count_unpacked(), of one weight.
Result<std::optional<Index>> elements_of(Reader& reader, const PackedWeight& weight, SmallReader& small) {
  if (weight.packing != Packing::kBitsandbytes4) return unpacked_elements(reader.catalog(), weight);
  if (!weight.find("weight") || !weight.find("quant_state")) return std::optional<Index>();
  const Json no_config;
  const IoFailureWatch watch;
  const auto shape = bitsandbytes4_shape(
      {reader.catalog(), weight, no_config, [&](std::size_t tensor) { return small.read(tensor); }, nullptr});
  if (!shape && watch.may_be_io_failure(shape.error())) return shape.error();
  return shape ? std::optional(volume(*shape)) : std::nullopt;
}

}  // namespace

Result<std::optional<Index>> count_unpacked(Reader& reader, const std::vector<const PackedWeight*>& weights,
                                            const std::string& spool) {
  std::vector<FileRange> states;
  for (const PackedWeight* const weight : weights)
    if (const auto state = weight->find("quant_state")) {
      const FragmentList& stored = reader.catalog().tensors()[*state].fragments;
      for (std::size_t i = 0; i < stored.size(); ++i) {
        const Extent e = stored.extent(i);
        states.push_back({reader.catalog().file_path(e.file), e.offset, e.length});
      }
    }
  ReadAhead ahead;
  ahead.fetch(states);
  SmallReader small(reader, spool, 1);
  std::optional<Index> sum = 0;
  for (const PackedWeight* const weight : weights) {
    const auto count = TRY(elements_of(reader, *weight, small));
    sum = sum && count ? checked_add(*sum, *count) : std::nullopt;
  }
  return sum;
}

}  // namespace reshard
