// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/value_changes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "lib/base/text.h"
#include "lib/device/convert.h"
#include "lib/model/formula.h"

namespace reshard {
namespace {

using Kind = ValueChange::Kind;
enum class Quantity { kValue, kMoment, kSecondMoment };

float rounded_to_bf16(float x) {
  std::array<std::byte, 2> half;
  convert(DType::kFloat32, DType::kBFloat16, reinterpret_cast<const std::byte*>(&x), half.data(), 1);
  convert(DType::kBFloat16, DType::kFloat32, half.data(), reinterpret_cast<std::byte*>(&x), 1);
  return x;
}

Result<double> root_of(const ValueChange& change, const ModelConfig& config) {
  const Index n = TRY(evaluate(change.of, config.numbers()).context(config.path));
  if (n < 1) return corrupt(config.path + ": " + explain(change.of, config.numbers()) + ": expected a positive number");
  return std::sqrt(static_cast<double>(n));
}

// Returns the factors from the parameter to the stored value and back. Each is rounded to float32 as MaxText rounds it:
// it multiplies by roots and by rounded reciprocals of roots, and never divides.
Result<std::pair<float, float>> factors(const ValueChange& change, const ModelConfig& config) {
  const double root = TRY(root_of(change, config));
  const auto single = static_cast<float>(root);
  if (change.kind == Kind::kOverRoot) return std::pair(static_cast<float>(1 / root), single);
  const float times = change.rounds_to_bf16 ? rounded_to_bf16(single) : single;
  return std::pair(times, 1.0F / times);
}

// Adds the step from the parameter to what is stored or, with `back`, from that to the parameter.
Status add_step(const ValueChange& change, Quantity quantity, bool back, const ModelConfig& config,
                std::vector<ValueStep>& out) {
  if (change.kind == Kind::kNone) return {};
  if (change.kind == Kind::kPlusOne) {
    if (quantity == Quantity::kValue) out.push_back({ValueStep::Kind::kPlus, back ? -1.0F : 1.0F});
    return {};
  }
  const auto [there, and_back] = TRY(factors(change, config));
  const bool is_value = quantity == Quantity::kValue;
  const float by = back == is_value ? and_back : there;
  out.push_back({ValueStep::Kind::kTimes, quantity == Quantity::kSecondMoment ? by * by : by});
  return {};
}

std::optional<Quantity> quantity_of(const StateKey& key) {
  if (key.kind == StateKind::kModel || key.suffix == kMasterSuffix) return Quantity::kValue;
  if (key.suffix == kMomentSuffix) return Quantity::kMoment;
  if (key.suffix == kSecondMomentSuffix) return Quantity::kSecondMoment;
  return std::nullopt;
}

// Returns how a convention stores the values of the parameter of a tensor of the view.
ValueChange change_of(const Family& family, const SourceView& view, const Tensor& t, const ParsedName& parsed,
                      Convention convention, bool is_source) {
  const bool is_tied = is_source && !parsed.rule->tied_to.empty() && !view.is_stored(t.name);
  const auto of = is_tied ? parse_name(family, parsed.rule->tied_to) : std::optional(parsed);
  const StoredRule* const stored = of ? stored_rule(family, *of->rule, convention, of->layer) : nullptr;
  return stored ? stored->change : ValueChange();
}

std::string text_of(const std::vector<ValueStep>& steps) {
  std::string out = "x";
  for (const ValueStep& step : steps) {
    const bool is_plus = step.kind == ValueStep::Kind::kPlus;
    const Json by = static_cast<double>(step.by);
    out += (is_plus ? " + " : " * ") + to_text(by);
  }
  return out;
}

void note(const SourceView& view, const Translation& names, const ValueChanges& changes, ConversionNotes& notes) {
  std::map<std::string, std::vector<std::string>> by_text;
  for (const ChangedTensor& c : changes.tensors)
    by_text[text_of(c.steps)].push_back(view.catalog.tensors()[c.tensor].name);
  for (const auto& [text, tensors] : by_text) {
    Json list = Json::array();
    for (const std::string& name : tensors) list.push_back(name);
    notes.arithmetic.push_back(Json::object()
                                   .set("from", info(names.model.convention).option)
                                   .set("to", info(*names.to).option)
                                   .set("computed", text)
                                   .set("in", "float32, rounded once to the dtype of the output")
                                   .set("tensors", std::move(list)));
  }
}

void apply(const std::vector<ValueStep>& steps, float& x) {
  for (const ValueStep& step : steps) x = step.kind == ValueStep::Kind::kTimes ? x * step.by : x + step.by;
}

// Reads the box into `out` as float32 and changes it.
Status fill(TensorSource& before, const ChangedTensor& changed, const Box& box, MutableBytes out,
            MutableBytes scratch) {
  const DType dtype = before.catalog().tensors()[changed.tensor].dtype;
  const auto n = static_cast<std::size_t>(volume(box)), bytes = n * static_cast<std::size_t>(byte_size(dtype));
  std::vector<std::byte> wide(bytes > out.size() ? bytes : 0);
  // Narrow elements are read to the end of `out`, and widened from its beginning without overtaking them.
  const MutableBytes stored = wide.empty() ? out.subspan(n * sizeof(float) - bytes, bytes) : MutableBytes(wide);
  TRY(before.read(changed.tensor, box, stored, scratch));
  constexpr std::size_t kWidened = 4096;
  std::array<float, kWidened> block;
  for (std::size_t i = 0; i < n; i += kWidened) {
    const std::size_t count = std::min(kWidened, n - i);
    convert(dtype, DType::kFloat32, stored.data() + i * static_cast<std::size_t>(byte_size(dtype)),
            reinterpret_cast<std::byte*>(block.data()), count);
    for (std::size_t k = 0; k < count; ++k) apply(changed.steps, block[k]);
    std::memcpy(out.data() + i * sizeof(float), block.data(), count * sizeof(float));
  }
  return {};
}

}  // namespace

Result<ValueChanges> change_values(SourceView& view, const Translation& names, ConversionNotes& notes) {
  ValueChanges out;
  const Model& model = names.model;
  if (!names.renames() || !model.config || model.convention == *names.to) return out;
  for (std::size_t i = 0; i < view.catalog.tensors().size(); ++i) {
    const Tensor& t = view.catalog.tensors()[i];
    const StateKey key = split_state_key(t.key());
    const auto quantity = quantity_of(key);
    const auto parsed = key.parameter.empty() ? std::nullopt : parse_name(*model.family, key.parameter);
    if (!quantity || !parsed || parsed->is_of_quantized() || view.applied.contains(i)) continue;
    const ValueChange from = change_of(*model.family, view, t, *parsed, model.convention, true);
    const ValueChange to = change_of(*model.family, view, t, *parsed, *names.to, false);
    if (from == to) continue;
    ChangedTensor changed{i, {}};
    TRY(add_step(from, *quantity, true, *model.config, changed.steps));
    TRY(add_step(to, *quantity, false, *model.config, changed.steps));
    if (changed.steps.empty()) continue;
    if (byte_size(t.dtype) < 2 || !can_convert(t.dtype, DType::kFloat32))
      return unsupported(view.catalog.where() + ": " + tensor_text(view.native(t.name)) + " is " +
                         std::string(info(t.dtype).torch_name) + ": " + std::string(info(*names.to).title) +
                         " have other values, which are computed of floating-point ones; --dtype bfloat16 first");
    if (!out.before) out.before = std::make_unique<Catalog>(view.catalog);
    Tensor& made = view.catalog.tensor(i);
    const DType own = made.model_dtype.value_or(made.dtype);
    made.model_dtype = to.kind == Kind::kPlusOne && byte_size(own) < 4 ? DType::kFloat32 : own;
    made.dtype = DType::kFloat32;
    out.tensors.push_back(std::move(changed));
  }
  note(view, names, out, notes);
  return out;
}

void set_changed(const ValueChanges& changes, TensorSource& before, ComputedSource& source) {
  for (const ChangedTensor& t : changes.tensors)
    source.set(t.tensor, [&before, &t](const Box& box, MutableBytes out, MutableBytes scratch) {
      return fill(before, t, box, out, scratch);
    });
}

}  // namespace reshard
