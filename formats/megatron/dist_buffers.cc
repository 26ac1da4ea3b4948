// SPDX-License-Identifier: Apache-2.0
#include "formats/megatron/dist_buffers.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>

#include "formats/megatron/dist_stacks.h"
#include "formats/megatron/megatron.h"
#include "formats/tensor_files/flat_runs.h"
#include "formats/tensor_files/joined_tensor.h"
#include "lib/base/text.h"

namespace reshard::megatron {
namespace {

// The flat buffer of a model chunk in one group of ranks that share an optimizer's state.
struct BufferGroup {
  Index optimizer = 0;  // with experts: 0 for the other parameters, 1 for experts
  Index group = 0, chunk = 0;
  friend bool operator<(const BufferGroup& a, const BufferGroup& b) {
    return std::tie(a.optimizer, a.group, a.chunk) < std::tie(b.optimizer, b.group, b.chunk);
  }
};

// A bucket of a flat buffer.
struct BufferName {
  BufferGroup group;
  Index bucket = 0;
  std::string word;
};
std::optional<BufferName> parse_buffer_name(std::string_view name) {
  BufferName out;
  out.group.optimizer = parse_chain(name);
  name = without_chain(name);
  if (!take(name, "optimizer.distributed.dp_group_idx_")) return std::nullopt;
  const auto group = take_number(name);
  const auto buffer = take(name, ".gbuf_idx_") ? take_number(name) : std::nullopt;
  constexpr std::string_view kBucket = ").bucket_idx_";
  const std::size_t close = name.find(kBucket);
  if (!group || !buffer || !take(name, ".dtype_(") || close == std::string_view::npos) return std::nullopt;
  name = name.substr(close - std::string_view(".dtype_(").size() + kBucket.size());
  const auto bucket = take_number(name);
  if (!bucket || !take(name, ".") || name.empty()) return std::nullopt;
  out.group.group = *group;
  out.group.chunk = *buffer;
  out.bucket = *bucket;
  out.word = state_word(name);
  return out;
}

// Returns the layers of a chunk of a stage, or nothing if they do not divide evenly and args do not say how they are
// distributed.
std::optional<std::vector<Index>> layers_of_stage(const Model& model, Index stage, Index chunk) {
  const auto all = model.args.number("num_layers");
  if (!all || *all < 0 || *all > kMaxStack) return std::nullopt;
  const Index p = model.degrees.pp, v = model.degrees.vpp;
  const auto first = model.args.number("decoder_first_pipeline_num_layers");
  const auto last = model.args.number("decoder_last_pipeline_num_layers");
  Index begin = 0, count = 0;
  if ((first && (*first < 0 || *first > *all)) || (last && (*last < 0 || *last > *all))) return std::nullopt;
  if (v == 1 && (first || last)) {
    const Index fixed = first.value_or(0) + last.value_or(0), others = p - first.has_value() - last.has_value();
    if (*all < fixed || others < 1 || (*all - fixed) % others != 0) return std::nullopt;
    const Index each = (*all - fixed) / others;
    count = stage == 0 && first ? *first : stage == p - 1 && last ? *last : each;
    begin = stage == 0 ? 0 : first.value_or(each) + (stage - 1) * each;
  } else {
    if (*all % (p * v) != 0) return std::nullopt;
    count = *all / (p * v);
    begin = chunk * (*all / v) + stage * count;
  }
  std::vector<Index> out;
  for (Index i = 0; i < count; ++i) out.push_back(begin + i);
  return out;
}

// Returns the places of a group's parameters in this order, or nothing if the file contradicts it. Groups count the tp
// ranks, or for experts the ep ranks, then the stages.
std::vector<BufferedParameter> place_group(const Model& model, const Catalog& stored, const BufferGroup& group,
                                           bool has_experts_apart, const std::map<Index, std::size_t>& buckets,
                                           const Modules& modules) {
  const bool is_of_experts = group.optimizer > 0;
  const Index ranks = is_of_experts ? model.degrees.etp : model.degrees.tp, ep = is_of_experts ? model.degrees.ep : 1;
  const Index tp = group.group % ranks, expert_rank = group.group / ranks % ep, stage = group.group / ranks / ep;
  if (stage >= model.degrees.pp || group.chunk >= model.degrees.vpp) return {};
  const auto layers = layers_of_stage(model, stage, group.chunk);
  if (!layers) return {};
  const Index experts = model.args.number("num_experts").value_or(1) / ep;  // on each rank
  const bool is_first = stage == 0 && group.chunk == 0;
  const bool is_last = stage == model.degrees.pp - 1 && group.chunk == model.degrees.vpp - 1;
  std::vector<std::string> names;
  for (const auto& [name, shape] : model.shapes) {
    const CoreName core = parse_core_name(name);
    if (has_experts_apart && core.is_expert() != is_of_experts) continue;
    if (is_of_experts && (experts < 1 || *core.expert / experts != expert_rank)) continue;
    const bool is_embedding = name.starts_with("embedding.");
    if (core.layer     ? std::binary_search(layers->begin(), layers->end(), *core.layer)
        : is_embedding ? is_first
                       : is_last)
      names.push_back(name);
  }
  const bool has_copy = model.is_tied && model.degrees.pp > 1 && is_last && !is_of_experts;
  if (has_copy) names.emplace_back(kHead);
  names = in_model_order(std::move(names), modules);
  std::reverse(names.begin(), names.end());

  std::vector<BufferedParameter> out;
  auto bucket = buckets.begin();
  Index at = 0, number = 0;
  std::set<Index> starts;
  const auto look_at = [&]() -> Index {
    starts.clear();
    const Tensor& flat = stored.tensors()[bucket->second];
    for (std::size_t i = 0; i < flat.fragments.size(); ++i) starts.insert(flat.fragments.box(i).begin(0));
    return bucket->first == number ? flat.shape[0] : -1;
  };
  if (bucket == buckets.end()) return {};
  Index length = look_at();
  for (const std::string& name : names) {
    BufferedParameter placed;
    placed.name = has_copy && name == kHead ? std::string(kEmbedding) : name;
    const auto cut = cut_of(name, model.args.flag("swiglu"));
    const auto shape = cut ? local_shape(*cut, model.shapes.at(placed.name), ranks) : Result<Dims>(Dims{});
    if (!cut || !shape) return {};
    placed.cut = *cut;
    placed.local = *shape;
    placed.rank = tp;
    placed.ranks = ranks;
    const Index n = volume(placed.local);
    Index begin = *checked_round_up(at, kBufferAlignment);
    if (begin > length - n) {
      if ((begin != length && at != length) || ++bucket == buckets.end()) return {};
      ++number;
      length = look_at();
      begin = 0;
      if (n > length) return {};
    }
    if (!starts.contains(begin)) return {};
    placed.bucket = number;
    placed.at = begin;
    out.push_back(std::move(placed));
    at = begin + n;
  }
  return at == length && std::next(bucket) == buckets.end() ? out : std::vector<BufferedParameter>();
}

}  // namespace

Buffers find_buffers(const Model& model, const Catalog& stored) {
  Buffers out;
  // For each group, the buckets of each state. Several dtypes in one buffer are not distinguished.
  std::map<BufferGroup, std::map<std::string, std::map<Index, std::size_t>>> groups;
  for (std::size_t i = 0; i < stored.tensors().size(); ++i) {
    const Tensor& tensor = stored.tensors()[i];
    const auto name = tensor.shape.rank() == 1 ? parse_buffer_name(tensor.name) : std::nullopt;
    if (!name) continue;
    out.words.emplace(i, name->word);
    groups[name->group][name->word].emplace(name->bucket, i);
  }
  if (groups.empty()) return out;
  const auto refuse = [&](std::string why) {
    out.why_not = std::move(why);
    return out;
  };
  const bool has_experts_apart = groups.rbegin()->first.optimizer > 0;
  const Index stages = model.degrees.pp * model.degrees.vpp;
  if (std::ssize(groups) !=
      model.degrees.tp * stages + (has_experts_apart ? model.degrees.etp * model.degrees.ep * stages : 0))
    return refuse("there are " + count_of(std::ssize(groups), "buffer") + " of a model on " + mesh_text(model.degrees));
  bool is_found = false;
  for (const Modules& modules : kAllModules) {
    if (modules.grouped_experts != model.args.flag("moe_grouped_gemm")) continue;
    std::map<std::size_t, std::vector<BufferedParameter>> all;
    bool fits = true;
    for (const auto& [group, words] : groups) {
      for (const auto& [word, buckets] : words) {
        const auto places = fits ? place_group(model, stored, group, has_experts_apart, buckets, modules)
                                 : std::vector<BufferedParameter>();
        fits = !places.empty();
        for (const BufferedParameter& p : places) all[buckets.at(p.bucket)].push_back(p);
      }
    }
    if (!fits || (is_found && all == out.placed)) continue;
    if (is_found) return refuse("the parameters fit in two orders");
    is_found = true;
    out.placed = std::move(all);
  }
  if (!is_found) return refuse("the pieces of the buffers fit no known order of the parameters");
  return out;
}

Status emit_buffer(
    const Tensor& tensor, const std::vector<BufferedParameter>& placed,
    const std::function<Status(const BufferedParameter& parameter, const Dims& shape, const Fragment& f)>& sink) {
  for (const FragmentList* list : {&tensor.fragments, &tensor.replicas}) {
    std::vector<std::pair<Index, std::size_t>> order;  // start and index of each piece
    for (std::size_t i = 0; i < list->size(); ++i)
      if (!list->box(i).empty()) order.emplace_back(list->box(i).begin(0), i);
    std::sort(order.begin(), order.end());
    for (const BufferedParameter& p : placed) {
      const Index begin = p.at, end = p.at + volume(p.local);
      const Dims shape = TRY(whole_shape(p.cut, p.local, p.ranks));
      const auto parts = parts_of_rank(p.cut, p.local, p.rank, p.ranks);
      auto at = std::upper_bound(order.begin(), order.end(), std::pair(begin, list->size()));
      if (at != order.begin()) --at;
      for (; at != order.end() && at->first < end; ++at) {
        StoredTensor run;
        static_cast<Fragment&>(run) = list->get(at->second);
        run.dtype = tensor.dtype;
        const Index from = std::max(begin, run.box.begin(0)), to = std::min(end, run.box.end(0));
        if (from >= to) continue;
        for (const Fragment& f : fragments_of_run(p.local, from - begin, to - begin, run, from - run.box.begin(0)))
          for (const LocalBox& part : parts)
            if (const auto held = in_whole(f, part, byte_size(tensor.dtype))) TRY(sink(p, shape, *held));
      }
    }
  }
  return {};
}

}  // namespace reshard::megatron
