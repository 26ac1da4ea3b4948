// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/adam.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>

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

// Returns a value as a number of steps; nothing if it is none.
std::optional<Index> as_steps(double value) {
  if (!(value >= 0 && value <= INT32_MAX) || value != std::floor(value)) return std::nullopt;
  return static_cast<Index>(value);
}

// Parses "10" or "10.0".
std::optional<Index> parse_steps(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? as_steps(value) : std::nullopt;
}

// Reads the number of steps in a tensor of one element.
Result<Index> read_steps(const SourceView& view, FileSource& source, std::size_t number) {
  constexpr Index kFloatStops = Index{1} << 24;  // a float32 of this value to which 1 is added stays the same
  const Tensor& t = view.catalog.tensors()[number];
  const bool is_integer = t.dtype == DType::kInt32 || t.dtype == DType::kInt64;
  if (t.elements() != 1 || (!is_integer && !is_floating(t.dtype)))
    return unsupported(tensor_text(view.native(t.name)) + " " + std::string(info(t.dtype).torch_name) + " " +
                       to_string(t.shape) + ": expected a single number of steps");
  std::vector<std::byte> scratch(std::size_t{1} << 16);
  const auto read = [&]<class Integer>(Integer value) -> Result<double> {
    TRY(source.read(number, whole(t.shape), std::as_writable_bytes(std::span(&value, 1)), scratch));
    return static_cast<double>(value);
  };
  const double value = t.dtype == DType::kInt32   ? TRY(read(std::int32_t{}))
                       : t.dtype == DType::kInt64 ? TRY(read(std::int64_t{}))
                                                  : TRY(read_floats(source, number, whole(t.shape), scratch)).front();
  const auto steps = as_steps(value);
  if (!steps || (!is_integer && *steps >= kFloatStops))
    return corrupt(tensor_text(view.native(t.name)) + ": expected a number of steps, got " + std::to_string(value));
  return *steps;
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
    if (states.size() == 1 && is_common_step({StateKind::kOptimizer, prefix, parameter, states.begin()->first}))
      continue;
    for (const auto& [suffix, i] : states)
      if (parameter.empty() || std::find(kOfAdam.begin(), kOfAdam.end(), suffix) == kOfAdam.end())
        others.push_back("'" + printable(view.native(view.catalog.tensors()[i].name)) + "'");
    if (!others.empty()) continue;
    for (const std::string_view moment : {kMomentSuffix, kSecondMomentSuffix})
      if (!states.contains(moment))
        return unsupported(view.catalog.where() + ": the optimizer has no " + std::string(moment.substr(1)) + " of " +
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
    return unsupported(view.catalog.where() + ": " + count_of(std::ssize(others), "tensor") + " of the optimizer (" +
                       some_of(others) + ") that are not Adam's state; add --exclude 'optim*' to leave the " +
                       "optimizer out");
  view.catalog.shares_extents = view.catalog.shares_extents || !masters.empty();
  for (Tensor& master : masters) TRY(view.catalog.add(std::move(master)));
  if (!rounded.empty())
    notes.warnings.push_back("The source has no float32 masters of " + count_of(std::ssize(rounded), "tensor") + " (" +
                             some_of(rounded) + "): their masters are the rounded weights.");
  return {};
}

namespace {

// The numbers of steps that a source has, each with the name of the first tensor or object that has it. One number
// unless parameters differ.
using Counts = std::map<Index, std::string>;

// Returns the number of steps of all parameters, nothing if the source has none. Fails (unsupported) if they differ.
Result<std::optional<Index>> single(const Counts& counts, const SourceView& view) {
  if (counts.empty()) return std::optional<Index>();
  const auto& [first, name_of_first] = *counts.begin();
  const auto& [last, name_of_last] = *counts.rbegin();
  if (first == last) return std::optional(first);
  return unsupported(view.catalog.where() + ": parameters have made different numbers of steps: " + name_of_last +
                     " is " + with_commas(last) + " and " + name_of_first + " is " + with_commas(first) +
                     ", and the output counts them once for all; add --exclude 'optim*' to leave the optimizer out");
}

// Returns the step tensors of the view, of parameters and of groups.
std::vector<std::size_t> step_tensors(const SourceView& view) {
  std::vector<std::size_t> out;
  for (const auto& [place, states] : states_of(view.catalog))
    if (const auto found = states.find(kStepSuffix); found != states.end()) out.push_back(found->second);
  return out;
}

// Reads tensors of steps into `counts`. Without `reads`, or if its bytes are not located, a tensor counts as 0.
Status count(const std::vector<std::size_t>& tensors, const SourceView& view, FilePool& files, bool reads,
             Counts& counts) {
  FileSource source(view.catalog, files);
  for (const std::size_t i : tensors) {
    const Tensor& t = view.catalog.tensors()[i];
    const Index steps = reads && t.located ? TRY(read_steps(view, source, i)) : 0;
    counts.try_emplace(steps, tensor_text(view.native(t.name)));
  }
  return {};
}

// Reads the source's objects of steps into `counts`. Returns whether any of them is of a single parameter.
bool count_objects(Reader& source, Counts& counts) {
  bool each = false;
  for (const Blob& blob : source.catalog().blobs) {
    const StateKey key = split_state_key(blob.key());
    if (key.kind != StateKind::kOptimizer || key.suffix != kStepSuffix) continue;
    each = each || key.prefix.ends_with(".state.");
    if (const auto steps = parse_steps(source.describe(blob))) counts.try_emplace(*steps, printable(blob.name));
  }
  return each;
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

Result<std::optional<Index>> take_steps(SourceView& view, FilePool& files, bool metadata_only) {
  Counts counts;
  const std::vector<std::size_t> tensors = step_tensors(view);
  TRY(count(tensors, view, files, !metadata_only, counts));
  view.values.insert(tensors.begin(), tensors.end());
  return single(counts, view);
}

Status add_steps(SourceView& view, Reader& source, FilePool& files) {
  std::vector<std::string> without;
  for (const auto& [place, states] : states_of(view.catalog))
    if (states.contains(kMomentSuffix) && !states.contains(kStepSuffix)) without.push_back(place.first + place.second);
  if (without.empty()) return {};
  Counts counts;
  if (count_objects(source, counts)) return {};
  std::vector<std::size_t> common;
  for (const std::size_t i : step_tensors(view)) {
    const Tensor& t = view.catalog.tensors()[i];
    if (t.elements() != 1 || !is_common_step(split_state_key(t.key()))) continue;
    if (t.name != t.key()) return {};  // the output keeps the names of a trainer that counts once
    common.push_back(i);
  }
  TRY(count(common, view, files, true, counts));
  view.applied.insert(common.begin(), common.end());  // they become the steps of each parameter
  if (counts.size() != 1) return {};
  const auto steps = static_cast<float>(counts.begin()->first);
  const std::uint32_t number = TRY(add_number(view, files, steps));
  for (const std::string& name : without) {
    Tensor step;
    step.name = name + std::string(kStepSuffix);
    step.fragments.add(whole(step.shape), {number, 0, sizeof steps});
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
  Counts counts;
  count_objects(source, counts);
  const std::vector<std::size_t> tensors = step_tensors(view);
  TRY(count(tensors, view, files, true, counts));
  for (const std::size_t i : tensors)
    if (view.catalog.tensors()[i].key() != counters[0]) view.values.insert(i);
  const auto steps = TRY(single(counts, view));
  if (!steps) return {};
  const std::uint32_t number = TRY(add_number(view, files, static_cast<std::int32_t>(*steps)));
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
