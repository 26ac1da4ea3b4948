// SPDX-License-Identifier: Apache-2.0
#include "lib/model/quantization.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "lib/base/text.h"
#include "lib/model/family.h"
#include "lib/model/formula.h"
#include "lib/model/packed_layouts.h"

namespace reshard {
namespace {

constexpr std::string_view kWeight = "weight";

// The model tensors of a catalog, sorted by their plain keys.
class Keys {
 public:
  explicit Keys(const Catalog& catalog) : catalog_(catalog) {
    const auto& tensors = catalog.tensors();
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (state_kind(tensors[i].key()) == StateKind::kModel) sorted_.emplace_back(tensors[i].key(), i);
    std::sort(sorted_.begin(), sorted_.end());
  }

  using Entry = std::pair<std::string_view, std::size_t>;  // key, tensor
  const std::vector<Entry>& all() const { return sorted_; }
  const Tensor& tensor(const Entry& entry) const { return catalog_.tensors()[entry.second]; }

  const Entry* find(std::string_view key) const {
    const auto at = lower_bound(key);
    return at != sorted_.end() && at->first == key ? &*at : nullptr;
  }
  template <class Visit>
  void with_prefix(std::string_view prefix, const Visit& visit) const {
    for (auto at = lower_bound(prefix); at != sorted_.end() && at->first.starts_with(prefix); ++at) visit(*at);
  }

 private:
  std::vector<Entry>::const_iterator lower_bound(std::string_view key) const {
    return std::lower_bound(sorted_.begin(), sorted_.end(), key,
                            [](const Entry& entry, std::string_view k) { return entry.first < k; });
  }

  const Catalog& catalog_;
  std::vector<Entry> sorted_;
};

// Returns the name of the weight that a tensor of this role and name belongs to, or an empty string if the name does
// not match.
std::string weight_of(const PackedRole& role, std::string_view key) {
  const std::string_view module = module_of(key);
  switch (role.where) {
    case PackedName::kAfter:
      if (role.name.empty() || !key.ends_with(role.name) || key.size() == role.name.size()) return {};
      return std::string(key.substr(0, key.size() - role.name.size()));
    case PackedName::kInModule: {
      if (!key.ends_with(role.name)) return {};
      const std::string_view before = key.substr(0, key.size() - role.name.size());
      return before.ends_with('.') ? std::string(before) + std::string(kWeight) : std::string();
    }
    case PackedName::kFlattened: {
      const std::string_view leaf = key.substr(module.size());
      if (module.empty() || !leaf.starts_with('_') || !leaf.ends_with(role.name)) return {};
      if (leaf.size() <= 1 + role.name.size()) return {};
      return std::string(module) + std::string(leaf.substr(1, leaf.size() - 1 - role.name.size()));
    }
  }
  return {};
}

// Returns the name of a role's tensor, or an empty string if a weight of this name has none.
std::string key_of(const PackedRole& role, std::string_view weight) {
  const std::string_view module = module_of(weight), leaf = weight.substr(module.size());
  switch (role.where) {
    case PackedName::kAfter:
      return std::string(weight) + std::string(role.name);
    case PackedName::kInModule:
      return leaf == kWeight ? std::string(module) + std::string(role.name) : std::string();
    case PackedName::kFlattened:
      return std::string(module) + "_" + std::string(leaf) + std::string(role.name);
  }
  return {};
}

bool contains(std::span<const std::string_view> list, std::string_view word) {
  return std::find(list.begin(), list.end(), word) != list.end();
}

bool is_wide_integer(DType dtype) { return dtype == DType::kInt64 || dtype == DType::kUint64; }

// Returns whether elements of this dtype may be packed values.
bool may_be_packed(DType dtype) {
  return dtype != DType::kBool && !is_floating(dtype) && !is_wide_integer(dtype) && byte_size(dtype) <= 4 &&
         dtype != DType::kComplex32;
}

// Returns whether a name next to packed values suggests that they are packed: "weight_scale", "zeros", "codebook".
bool tells_of_packing(std::string_view leaf) {
  static constexpr std::string_view kWords[] = {"scale", "zero", "absmax", "quant", "codebook", "centroid", "lut"};
  return std::any_of(std::begin(kWords), std::end(kWords),
                     [&](std::string_view word) { return leaf.find(word) != std::string_view::npos; });
}

// Counts the elements of a module whose names have no word of packing. Marlin has a matrix "B" of integers and a
// smaller one "s" of scales; an ordinary module with integers, such as indices, has a weight.
class ModuleElements {
 public:
  void add(std::string_view role, const Tensor& tensor) {
    const bool is_matrix = tensor.shape.rank() == 2 || tensor.shape.rank() == 3;
    if (is_floating(tensor.dtype)) {
      floats_ += tensor.elements();
      has_weight_ = has_weight_ || role == kWeight;
    } else if (is_matrix && may_be_packed(tensor.dtype)) {
      integers_ = std::max(integers_, tensor.elements());
    }
  }
  bool look_packed() const { return !has_weight_ && floats_ > 0 && floats_ < integers_; }

 private:
  Index integers_ = 0, floats_ = 0;
  bool has_weight_ = false;
};

class Finder {
 public:
  Finder(const Catalog& catalog, const ModelConfig* config)
      : catalog_(catalog),
        keys_(catalog),
        method_(config ? config->quantization : std::string()),
        is_taken_(catalog.tensors().size()) {}

  std::vector<PackedWeight> find() {
    if (std::none_of(keys_.all().begin(), keys_.all().end(),
                     [&](const Keys::Entry& e) { return !is_floating(keys_.tensor(e).dtype); }))
      return {};  // packed values and their descriptions are not ordinary floats
    for (const PackedLayout& layout : packed_layouts()) find(layout, false);
    for (const PackedLayout& layout : packed_layouts())
      if (contains(layout.methods, method_)) find(layout, true);
    find_unknown();
    std::sort(out_.begin(), out_.end(),
              [](const PackedWeight& a, const PackedWeight& b) { return natural_less(a.name, b.name); });
    return std::move(out_);
  }

 private:
  // Proposes a weight for each tensor whose name is a sign of the layout. With `is_said` the config's method has the
  // layout, so weights are found even if only scales are left of them.
  void find(const PackedLayout& layout, bool is_said) {
    std::set<std::string, std::less<>> seen;
    for (const PackedRole& role : layout.roles) {
      if (!role.is_sign && !(is_said && role.is_needed && role.where == PackedName::kInModule)) continue;
      for (const Keys::Entry& entry : keys_.all()) {
        if (is_taken_[entry.second] || !fits(role.dtype, keys_.tensor(entry).dtype)) continue;
        if (is_activation_scale(entry.first)) continue;
        std::string weight = weight_of(role, entry.first);
        if (weight.empty() || (is_said && !is_named_weight(weight, role))) continue;
        if (seen.insert(weight).second) try_layout(layout, std::move(weight), is_said);
      }
    }
  }

  // Returns whether a name may count as missing its weight. One like "logit_scale" may not: only its ending suggests a
  // scale of weights.
  static bool is_named_weight(std::string_view weight, const PackedRole& role) {
    return role.name != "scale" && weight.substr(module_of(weight).size()) == kWeight;
  }

  void try_layout(const PackedLayout& layout, std::string weight, bool is_proven) {
    PackedWeight out{layout.packing, std::move(weight), {}, {}};
    for (const PackedRole& role : layout.roles) {
      const std::string key = key_of(role, out.name);
      const Keys::Entry* const entry = key.empty() ? nullptr : keys_.find(key);
      if (!entry || is_taken_[entry->second] || out.find(role.role)) continue;
      if (!fits(role.dtype, keys_.tensor(*entry).dtype)) {
        if (role.is_needed) return;
        continue;
      }
      is_proven = is_proven || role.is_proof;
      out.parts.push_back({std::string(role.role), entry->second});
    }
    if (!is_proven) return;
    note_missing(layout, out);
    add_rest(layout.rest, out);
    refine(out);
    take(std::move(out));
  }

  // If a role has several names, only the first is reported.
  static void note_missing(const PackedLayout& layout, PackedWeight& weight) {
    std::string_view told;
    for (const PackedRole& role : layout.roles) {
      if (!role.is_needed || weight.find(role.role) || role.role == told) continue;
      told = role.role;
      if (std::string key = key_of(role, weight.name); !key.empty()) weight.missing.push_back(std::move(key));
    }
  }

  void add_part(PackedWeight& weight, std::string_view role, std::size_t tensor) const {
    const auto is_it = [&](const PackedTensor& part) { return part.tensor == tensor; };
    if (is_taken_[tensor] || std::any_of(weight.parts.begin(), weight.parts.end(), is_it)) return;
    weight.parts.push_back({std::string(role), tensor});
  }

  void add_rest(PackedLayout::Rest rest, PackedWeight& weight) const {
    const std::string_view module = module_of(weight.name), leaf = std::string_view(weight.name).substr(module.size());
    const auto add_all = [&](const std::string& prefix, std::string_view but) {
      keys_.with_prefix(prefix, [&](const Keys::Entry& entry) {
        const std::string_view role = entry.first.substr(prefix.size());
        if (role != but && !role.empty()) add_part(weight, role, entry.second);
      });
    };
    if (rest == PackedLayout::Rest::kModule && leaf == kWeight && !module.empty()) add_all(std::string(module), "bias");
    if (rest == PackedLayout::Rest::kFlattened) {
      add_all(std::string(module) + "_" + std::string(leaf) + "_", {});
      add_all(weight.name + ":", {});
    }
    if (leaf != kWeight) return;
    for (const std::string_view scale : activation_scales())
      if (const Keys::Entry* const entry = keys_.find(std::string(module) + std::string(scale)))
        add_part(weight, scale, entry->second);
  }

  const Dims* shape(const PackedWeight& weight, std::string_view role) const {
    const auto tensor = weight.find(role);
    return tensor ? &catalog_.tensors()[*tensor].shape : nullptr;
  }

  // Distinguishes layouts whose tensors have the same names.
  void refine(PackedWeight& weight) const {
    if (weight.packing == Packing::kGptq && !weight.find("g_idx")) {
      // Both pack along one dimension: GPTQ along rows, so the columns equal those of the scales; AWQ along columns.
      const Dims *const values = shape(weight, "qweight"), *const scales = shape(weight, "scales");
      const bool packs_rows =
          values && scales && values->rank() == 2 && scales->rank() == 2 && (*values)[1] == (*scales)[1];
      if (method_ == "awq" || (method_ != "gptq" && values && scales && !packs_rows)) weight.packing = Packing::kAwq;
    }
    if (weight.packing == Packing::kCompressedMxfp4) {  // the names are the same, 32 values take 16 or 24 bytes
      const Dims *const values = shape(weight, "packed"), *const scales = shape(weight, "scale");
      const bool has_groups = values && scales && values->rank() == 2 && scales->rank() == 2;
      if (has_groups && (*values)[1] / 24 == (*scales)[1] && (*values)[1] % 24 == 0)
        weight.packing = Packing::kCompressedMxfp6;
    }
    if (weight.packing == Packing::kBitsandbytes4) {  // double quantization: the scales are packed too
      const auto absmax = weight.find("absmax");
      for (const std::string_view role : {"nested_absmax", "nested_quant_map"})
        if (absmax && catalog_.tensors()[*absmax].dtype == DType::kUint8 && !weight.find(role))
          weight.missing.push_back(weight.name + "." + std::string(role));
    }
    if (weight.packing == Packing::kInteger) {
      const auto values = weight.find("weight"), scale = weight.find("scale");
      if (values && scale && catalog_.tensors()[*values].dtype == DType::kUint8 &&
          (method_ == "bitnet" || (method_.empty() && catalog_.tensors()[*scale].elements() == 1)))
        weight.packing = Packing::kBitnet;
    }
  }

  // Finds packed values of no known layout, with everything else in their module or named after them.
  void find_unknown() {
    std::set<std::string_view> seen;  // modules
    for (const Keys::Entry& entry : keys_.all()) {
      const Tensor& t = keys_.tensor(entry);
      if (is_taken_[entry.second] || !may_be_packed(t.dtype) || t.shape.rank() < 1) continue;
      if (is_activation_scale(entry.first)) continue;
      PackedWeight out{Packing::kUnknown, std::string(entry.first), {{"values", entry.second}}, {}};
      bool is_told = false;
      ModuleElements elements;
      const auto add = [&](std::string_view prefix, const Keys::Entry& other) {
        const std::string_view role = other.first.substr(prefix.size());
        if (other.second == entry.second || role == "bias" || is_taken_[other.second]) return;
        is_told = is_told || (tells_of_packing(role) && !is_activation_scale(other.first));
        add_part(out, role, other.second);
      };
      for (const char separator : {'.', '_', ':'}) {
        const std::string prefix = std::string(entry.first) + separator;
        keys_.with_prefix(prefix, [&](const Keys::Entry& other) { add(prefix, other); });
      }
      const std::string_view module = module_of(entry.first);
      if (!module.empty() && seen.insert(module).second)
        keys_.with_prefix(module, [&](const Keys::Entry& other) {
          const std::string_view role = other.first.substr(module.size());
          if (role.find('.') != std::string_view::npos) return;
          if (role != "bias" && !is_activation_scale(other.first)) elements.add(role, keys_.tensor(other));
          add(module, other);
        });
      if (is_told || elements.look_packed()) take(std::move(out));
    }
  }

  void take(PackedWeight weight) {
    for (const PackedTensor& part : weight.parts) is_taken_[part.tensor] = true;
    out_.push_back(std::move(weight));
  }

  const Catalog& catalog_;
  const Keys keys_;
  const std::string method_;  // of the config; usually empty
  std::vector<bool> is_taken_;
  std::vector<PackedWeight> out_;
};

}  // namespace

std::optional<std::size_t> PackedWeight::find(std::string_view role) const {
  const auto part = std::find_if(parts.begin(), parts.end(), [&](const PackedTensor& p) { return p.role == role; });
  return part == parts.end() ? std::nullopt : std::optional(part->tensor);
}

const PackedWeight* PackedWeights::of(std::size_t tensor) const {
  return is_of(tensor) && of_[tensor] != kBeside ? &weights[of_[tensor]] : nullptr;
}

PackedWeights find_packed(const Catalog& catalog, const ModelConfig* config) {
  PackedWeights out;
  out.weights = Finder(catalog, config).find();
  if (out.empty()) return out;
  out.of_.resize(catalog.tensors().size(), PackedWeights::kNone);
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i)
    if (const std::string& key = catalog.tensors()[i].key();
        state_kind(key) == StateKind::kModel && is_activation_scale(key))
      out.of_[i] = PackedWeights::kBeside;
  for (std::size_t w = 0; w < out.weights.size(); ++w)
    for (const PackedTensor& part : out.weights[w].parts) out.of_[part.tensor] = static_cast<std::uint32_t>(w);
  return out;
}

namespace {

// Returns the value of a name in a shape equation: "scales[1]", "scales[-1]", "size(scales)", "rank(scales)".
std::optional<Index> shape_number(const Catalog& catalog, const PackedWeight& weight, std::string_view name) {
  const std::size_t open = name.find_first_of("([");
  if (open == std::string_view::npos) return std::nullopt;
  const std::string_view inner = name.substr(open + 1, name.size() - open - 2);
  const bool is_dimension = name[open] == '[';
  const auto tensor = weight.find(is_dimension ? name.substr(0, open) : inner);
  if (!tensor) return std::nullopt;
  const Dims& shape = catalog.tensors()[*tensor].shape;
  if (!is_dimension) return name.starts_with("size") ? volume(shape) : Index{shape.rank()};
  const Index d = inner == "-1" ? shape.rank() - 1 : parse_number(inner).value_or(-1);
  if (d < 0 || d >= shape.rank()) return std::nullopt;
  return shape[static_cast<int>(d)];
}

// Returns the first equation that does not hold, or an empty string.
std::string_view failed_equation(const Catalog& catalog, const PackedWeight& weight, ShapeEquations equations) {
  const NumberOf number_of = [&](std::string_view name) { return shape_number(catalog, weight, name); };
  for (const std::string_view equation : equations) {
    const std::size_t sign = equation.find(" = ");
    const auto left = evaluate(equation.substr(0, sign), number_of),
               right = evaluate(equation.substr(sign + 3), number_of);
    if (left && right && *left != *right) return equation;
  }
  return {};
}

// Returns whether scales of this shape fit a matrix: a single one, one per row, or one per block.
bool are_of_blocks(const Dims& scales, const Dims& matrix) {
  if (volume(scales) == 1 || (scales.rank() == 1 && matrix.rank() > 0 && scales[0] == matrix[0])) return true;
  if (scales.rank() != matrix.rank()) return false;
  for (int d = 0; d < scales.rank(); ++d)
    if (scales[d] < 1 || scales[d] > matrix[d] || ceil_div(matrix[d], ceil_div(matrix[d], scales[d])) != scales[d])
      return false;
  return true;
}

// Returns the layout of weights that are packed in this way; null if there is none.
const PackedLayout* find_layout(Packing packing) {
  for (const PackedLayout& layout : packed_layouts())
    if (layout.packing == packing) return &layout;
  return nullptr;
}

// "qweight [8, 64], scales [2, 64]"
std::string shapes_of(const Catalog& catalog, const PackedWeight& weight) {
  std::string out;
  for (const PackedTensor& part : weight.parts)
    out += (out.empty() ? "" : ", ") + printable(part.role) + " " + to_string(catalog.tensors()[part.tensor].shape);
  return out;
}

}  // namespace

std::optional<std::string> shape_fault(const Catalog& catalog, const PackedWeight& weight) {
  const std::string shapes = "its shapes disagree: " + shapes_of(catalog, weight);
  if (weight.packing == Packing::kFloat8 || weight.packing == Packing::kInteger) {
    const auto values = weight.find("weight"), scale = weight.find("scale");
    const auto& tensors = catalog.tensors();
    if (!values || !scale || are_of_blocks(tensors[*scale].shape, tensors[*values].shape)) return std::nullopt;
    return shapes + "; expected one scale, one per row, or one per block";
  }
  std::string_view failed;
  for (const ShapeEquations equations : shape_equations(weight.packing)) {
    const std::string_view here = failed_equation(catalog, weight, equations);
    if (here.empty()) return std::nullopt;
    if (failed.empty()) failed = here;
  }
  if (failed.empty()) return std::nullopt;
  return shapes + "; expected " + std::string(failed);
}

std::optional<Index> unpacked_elements(const Catalog& catalog, const PackedWeight& weight) {
  const auto& tensors = catalog.tensors();
  const PackedLayout* const layout = find_layout(weight.packing);
  if (!layout || weight.parts.empty() || weight.parts[0].role != layout->roles[0].role) return {};
  const Tensor& values = tensors[weight.parts[0].tensor];
  if (layout->values > 0) return checked_mul(values.elements(), layout->values);
  // GPTQ and AWQ pack the zero points of the scales' columns like the values.
  const auto scales = weight.find("scales"), zeros = weight.find("qzeros");
  if ((weight.packing != Packing::kGptq && weight.packing != Packing::kAwq) || !scales || !zeros) return {};
  const Dims &columns = tensors[*scales].shape, &words = tensors[*zeros].shape;
  if (columns.rank() != 2 || words.rank() != 2 || words[1] < 1) return {};
  const auto packed = checked_mul(values.elements(), columns[1]);
  return packed ? std::optional(*packed / words[1]) : std::nullopt;
}

std::string_view packing_title(Packing packing) {
  const PackedLayout* const layout = find_layout(packing);
  return layout ? layout->title : "an unknown quantization";
}

std::vector<std::size_t> unknown_beside(const Catalog& catalog, const PackedWeights& packed) {
  std::set<std::string_view> modules;  // of packed weights
  for (const PackedWeight& weight : packed.weights)
    if (const std::string_view name = weight.name; name.substr(module_of(name).size()) == kWeight)
      modules.insert(module_of(name));
  std::vector<std::size_t> out;
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i) {
    const std::string_view key = catalog.tensors()[i].key(), module = module_of(key);
    if (packed.is_of(i) || key.substr(module.size()) == "bias" || !modules.contains(module)) continue;
    if (state_kind(key) == StateKind::kModel) out.push_back(i);
  }
  return out;
}

std::string packed_text(const PackedWeights& packed) {
  std::map<Packing, Index> counts;
  for (const PackedWeight& weight : packed.weights) ++counts[weight.packing];
  std::string out;
  for (const auto& [packing, count] : counts)
    out += (out.empty() ? count_of(count, "weight") + " packed as " : ", " + with_commas(count) + " as ") +
           std::string(packing_title(packing));
  return out;
}

}  // namespace reshard
