// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/adam.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/source/computed_source.h"
#include "lib/source/tensor_source.h"

namespace reshard {
namespace {

constexpr std::array<std::string_view, 4> kOfAdam = {kMomentSuffix, kSecondMomentSuffix, kMasterSuffix, kStepSuffix};

// The optimizer's tensors of each parameter, by prefix and name of their keys, then by suffix.
using States = std::map<std::pair<std::string, std::string>, std::map<std::string, std::size_t, std::less<>>>;
States states_of(const Catalog& catalog) {
  States out;
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i) {
    StateKey key = split_state_key(catalog.tensors()[i].key());
    if (key.kind == StateKind::kOptimizer)
      out[{std::move(key.prefix), std::move(key.parameter)}].emplace(std::move(key.suffix), i);
  }
  return out;
}

// "10", "10.0"
std::optional<double> parse_real(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

// Reads a scalar that counts; nothing if it is no number.
Result<std::optional<double>> read_count(FileSource& source, std::size_t number) {
  const Tensor& t = source.catalog().tensors()[number];
  std::array<std::byte, 8> bytes{};
  std::vector<std::byte> scratch(std::size_t{1} << 12);
  const auto as = [&]<class Number>(Number value) -> Result<std::optional<double>> {
    const std::span<std::byte> out = std::span(bytes).first(sizeof value);
    TRY(source.read(number, whole(t.shape), out, scratch));
    std::memcpy(&value, out.data(), sizeof value);
    return std::optional(static_cast<double>(value));
  };
  switch (t.dtype) {
    case DType::kInt32:
      return as(std::int32_t{});
    case DType::kInt64:
      return as(std::int64_t{});
    case DType::kFloat32:
      return as(float{});
    default:
      return std::optional<double>();
  }
}

// Returns whether a key is the step of all parameters: "optimizer.param_groups.0.step".
bool is_common_step(const StateKey& key) {
  return key.kind == StateKind::kOptimizer && key.suffix == kStepSuffix && !key.prefix.ends_with(".state.");
}

}  // namespace

Status add_masters(SourceView& view, ConversionNotes& notes) {
  std::vector<std::string> others, rounded;
  std::vector<Tensor> masters;
  for (const auto& [place, states] : states_of(view.catalog)) {
    const auto& [prefix, parameter] = place;
    for (const auto& [suffix, i] : states)
      if (parameter.empty() || std::find(kOfAdam.begin(), kOfAdam.end(), suffix) == kOfAdam.end())
        others.push_back("'" + printable(view.native(view.catalog.tensors()[i].name)) + "'");
    if (!others.empty()) continue;
    for (const std::string_view moment : {kMomentSuffix, kSecondMomentSuffix})
      if (!states.contains(moment))
        return unsupported(view.catalog.root + ": the optimizer has no " + std::string(moment.substr(1)) + " of " +
                           tensor_text(parameter) +
                           ": expected both of Adam's moments; add --exclude 'optim*' to leave the optimizer out");
    if (states.contains(kMasterSuffix)) continue;
    const auto weight = view.catalog.find(parameter);
    const Tensor& moment = view.catalog.tensors()[states.find(kMomentSuffix)->second];
    if (!weight || view.catalog.tensors()[*weight].shape != moment.shape)
      return unsupported(tensor_text(view.native(moment.name)) + " " + to_string(moment.shape) +
                         ": no weight of this shape belongs to this moment");
    Tensor master = view.catalog.tensors()[*weight];
    if (!is_floating(master.dtype) || byte_size(master.dtype) == 1)
      return unsupported(tensor_text(view.native(master.name)) + " is " + std::string(info(master.dtype).torch_name) +
                         " and has no float32 master");
    if (master.dtype != DType::kFloat32) rounded.push_back("'" + printable(view.native(master.name)) + "'");
    master.name = prefix + parameter + std::string(kMasterSuffix);
    master.plain_key.clear();
    master.path.clear();
    master.model_dtype = DType::kFloat32;
    masters.push_back(std::move(master));
  }
  if (!others.empty())
    return unsupported(view.catalog.root + ": " + count_of(std::ssize(others), "tensor") + " of the optimizer (" +
                       some_of(others) + ") that are not Adam's state; add --exclude 'optim*' to leave the " +
                       "optimizer out");
  view.catalog.shares_extents = view.catalog.shares_extents || !masters.empty();
  for (Tensor& master : masters) TRY(view.catalog.add(std::move(master)));
  if (!rounded.empty())
    notes.warnings.push_back("The source has no float32 masters of " + count_of(std::ssize(rounded), "tensor") + " (" +
                             some_of(rounded) + "): their masters are the rounded weights.");
  return {};
}

Result<std::optional<Index>> take_steps(SourceView& view, FilePool& files, bool metadata_only) {
  std::vector<std::byte> scratch(std::size_t{1} << 16);
  FileSource source(view.catalog, files);
  std::optional<Index> steps;
  std::string first;
  for (const auto& [place, states] : states_of(view.catalog)) {
    const auto found = states.find(kStepSuffix);
    if (found == states.end()) continue;
    const Tensor& tensor = view.catalog.tensors()[found->second];
    if (tensor.elements() != 1)
      return unsupported(tensor_text(view.native(tensor.name)) + " " + to_string(tensor.shape) +
                         ": expected a single number of steps");
    view.values.insert(found->second);
    if (metadata_only) {
      steps = 0;
      continue;
    }
    const float value = TRY(read_floats(source, found->second, whole(tensor.shape), scratch)).front();
    if (!(value >= 0 && value < 16'777'216) || value != std::floor(value))
      return corrupt(tensor_text(view.native(tensor.name)) + ": expected a number of steps, got " +
                     std::to_string(value));
    if (steps && *steps != static_cast<Index>(value))
      return unsupported(view.catalog.root + ": " + tensor_text(view.native(tensor.name)) + " is " +
                         std::to_string(static_cast<Index>(value)) + " and " + tensor_text(first) + " is " +
                         std::to_string(*steps) + "; the output stores one number of steps for all parameters");
    steps = static_cast<Index>(value);
    first = view.native(tensor.name);
  }
  return steps;
}

namespace {

// The number of steps as the source counts them.
struct Counts {
  std::set<double> values;  // of one element unless parameters differ
  bool each = false;        // whether objects count the steps of each parameter
};

// Adds what the source's objects count.
Counts counts_of_objects(Reader& source) {
  Counts out;
  for (const Blob& blob : source.catalog().blobs) {
    const StateKey key = split_state_key(blob.key());
    if (key.kind != StateKind::kOptimizer || key.suffix != kStepSuffix) continue;
    out.each = out.each || key.prefix.ends_with(".state.");
    if (const auto count = parse_real(source.describe(blob))) out.values.insert(*count);
  }
  return out;
}

// Adds a file of the view that exists in memory only, and returns its number.
template <class Number>
Result<std::uint32_t> add_number(SourceView& view, FilePool& files, Number number) {
  std::array<std::byte, sizeof number> bytes;
  std::memcpy(bytes.data(), &number, sizeof number);
  File file = TRY(File::create_in_memory());
  TRY(file.write_at(0, bytes));
  const auto at = static_cast<std::uint32_t>(view.catalog.files.size());
  view.catalog.files.push_back({"(steps)", sizeof number});
  files.pin(view.catalog.file_path(at), std::move(file));
  view.catalog.shares_extents = true;
  return at;
}

}  // namespace

Status add_steps(SourceView& view, Reader& source, FilePool& files) {
  std::vector<std::string> without;
  for (const auto& [place, states] : states_of(view.catalog))
    if (states.contains(kMomentSuffix) && !states.contains(kStepSuffix)) without.push_back(place.first + place.second);
  if (without.empty()) return {};
  auto [counts, each] = counts_of_objects(source);
  if (each) return {};
  FileSource stored(view.catalog, files);
  for (std::size_t i = 0; i < view.catalog.tensors().size(); ++i) {
    const Tensor& t = view.catalog.tensors()[i];
    if (t.elements() != 1 || !is_common_step(split_state_key(t.key()))) continue;
    if (t.name != t.key()) return {};  // the output keeps the names of a trainer that counts once
    const auto count = t.located ? TRY(read_count(stored, i)) : std::optional<double>(0);
    if (!count) continue;
    counts.insert(*count);
    view.applied.insert(i);  // it becomes the step of each parameter
  }
  if (counts.size() != 1) return {};
  const auto count = static_cast<float>(*counts.begin());
  const std::uint32_t number = TRY(add_number(view, files, count));
  for (const std::string& name : without) {
    Tensor step;
    step.name = name + std::string(kStepSuffix);
    step.fragments.add(whole(step.shape), {number, 0, sizeof count});
    const StateKey key = split_state_key(step.name);
    const std::string_view prefix = key.prefix;  // "optimizer.state."
    step.path = {std::string(prefix.substr(0, prefix.find('.'))), std::string("state"), key.parameter,
                 std::string(kStepSuffix.substr(1))};
    TRY(view.catalog.add(std::move(step)));
  }
  return {};
}

Status count_steps_once(SourceView& view, std::span<const std::string_view> counters, Reader& source, FilePool& files) {
  const States states = states_of(view.catalog);
  if (std::none_of(states.begin(), states.end(), [](const auto& s) { return s.second.contains(kMomentSuffix); }))
    return {};
  std::set<double> counts = counts_of_objects(source).values;
  FileSource stored(view.catalog, files);
  for (const auto& [place, tensors] : states) {
    const auto found = tensors.find(kStepSuffix);
    if (found == tensors.end()) continue;
    const Tensor& t = view.catalog.tensors()[found->second];
    if (t.elements() != 1) continue;
    if (const auto count = t.located ? TRY(read_count(stored, found->second)) : std::optional<double>(0)) {
      counts.insert(*count);
      if (t.key() != counters[0]) view.values.insert(found->second);
    }
  }
  if (counts.size() > 1)
    return unsupported(
        view.catalog.root + ": parameters have made different numbers of steps, " +
        with_commas(static_cast<Index>(*counts.begin())) + " to " + with_commas(static_cast<Index>(*counts.rbegin())) +
        ", and the output counts them once for all; " + "add --exclude 'optim*' to leave the optimizer out");
  if (counts.empty()) return {};
  const double count = *counts.begin();
  if (!(count >= 0 && count <= INT32_MAX) || count != std::floor(count))
    return corrupt(view.catalog.root + ": expected a number of steps, got " + std::to_string(count));
  const std::uint32_t number = TRY(add_number(view, files, static_cast<std::int32_t>(count)));
  for (const std::string_view key : counters) {
    if (view.catalog.find(key)) continue;
    Tensor counter;
    counter.name = key;
    counter.dtype = DType::kInt32;
    counter.fragments.add(whole(counter.shape), {number, 0, sizeof(std::int32_t)});
    TRY(view.catalog.add(std::move(counter)));
  }
  return {};
}

}  // namespace reshard
