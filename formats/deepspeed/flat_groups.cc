// SPDX-License-Identifier: Apache-2.0
#include "formats/deepspeed/flat_groups.h"

#include <algorithm>

#include "lib/base/text.h"

namespace reshard::deepspeed {
namespace {

constexpr Index kMaxExperts = Index{1} << 20;

// Returns the length of the longest vector of a group on a rank. The padding of masters may be cut off, that of moments
// is not.
Index longest(const GroupState& group) {
  Index out = group.master ? group.master->shape()[0] : 0;
  for (const auto& [name, tensor] : group.tensors)
    if (tensor.shape().rank() > 0) out = std::max(out, tensor.shape()[0]);
  return out;
}

// Returns into how many runs a group's vectors or parameters are cut; 0: the file does not say.
Index cuts_of(const RankStates& rank, std::size_t g) {
  const auto& counts = rank.states.partition_counts;
  if (rank.states.cuts_parameters && counts.size() == 1) return counts[0];
  return g < counts.size() ? counts[g] : 0;
}

Error counts_differ(const RankStates& rank, std::size_t g, std::size_t ranks) {
  const Index cuts = cuts_of(rank, g);
  const std::string count = cuts > 0 ? std::to_string(cuts) : "none";
  return corrupt(rank.path + ": partition_count of " + group_text(g) + ": expected " + std::to_string(ranks) +
                 ", the number of rank files, got " + count + ": the files belong to another run, or some are missing");
}

// Finds parameters that follow each other in one vector, which is cut into equal runs.
Status cut_vector(const std::vector<RankStates>& ranks, const std::vector<std::size_t>& of, std::size_t g,
                  const Group& group, std::vector<FlatParameter>& out) {
  const RankStates& first = ranks[of[0]];
  const auto count = std::ssize(of);
  Index length = 0;
  for (const std::size_t r : of) length = std::max(length, longest(ranks[r].states.groups[g]));
  static const std::vector<Index> kNone;
  const auto& all_paddings = first.states.paddings;
  const std::vector<Index>& paddings = g < all_paddings.size() ? all_paddings[g] : kNone;
  Index at = 0;
  for (std::size_t i = 0; i < group.size(); ++i) {
    FlatParameter placed{group[i], g, {}};
    const Index elements = volume(group[i].shape);
    const auto end = checked_add(at, elements);
    const auto next = end ? checked_add(*end, i < paddings.size() ? paddings[i] : 0) : std::nullopt;
    if (!next) return corrupt(first.path + ": " + group_text(g) + ": parameters of 2^63 elements or more");
    for (Index begin = at; begin < *end && length > 0;) {
      const Index rank = begin / length;
      if (rank >= count) break;  // too short; reported below
      const Index stop = std::min(*end, (rank + 1) * length);
      placed.runs.push_back({of[rank], begin - at, stop - at, begin - rank * length});
      begin = stop;
    }
    at = *next;
    out.push_back(std::move(placed));
  }
  // DeepSpeed pads to a multiple of twice the number of ranks.
  const auto stored = checked_mul(length, count);
  const auto want = checked_round_up(at, 2 * count),
             have = stored ? checked_round_up(*stored, 2 * count) : std::nullopt;
  if (!want || want != have)
    return corrupt(first.path + ": " + group_text(g) + ": expected " + with_commas(at) +
                   " numbers (param_shapes) and their padding in the vectors of its ranks, got " +
                   count_of(count, "vector") + " of " + with_commas(length) +
                   ": a file was truncated or belongs to another run");
  return {};
}

// Finds parameters that are each cut into equal runs.
Status cut_parameters(const std::vector<RankStates>& ranks, const std::vector<std::size_t>& of, std::size_t g,
                      const Group& group, std::vector<FlatParameter>& out) {
  const auto count = std::ssize(of);
  Index at = 0;
  for (const NamedShape& p : group) {
    FlatParameter placed{p, g, {}};
    const Index elements = volume(p.shape), each = ceil_div(elements, count);
    for (Index rank = 0; rank < count && rank * each < elements; ++rank)
      placed.runs.push_back({of[rank], rank * each, std::min(elements, (rank + 1) * each), at});
    const auto next = checked_add(at, each);
    if (!next) return corrupt(ranks[of[0]].path + ": " + group_text(g) + ": parameters of 2^63 elements or more");
    at = *next;
    out.push_back(std::move(placed));
  }
  for (const std::size_t r : of)
    if (const Index length = ranks[r].states.groups[g].master->shape()[0]; length != at)
      return corrupt(ranks[r].path + ": " + group_text(g) + ": expected a vector of " + with_commas(at) +
                     " numbers, this rank's of param_shapes, got " + with_commas(length) +
                     ": a file was truncated or belongs to another run");
  return {};
}

// Adds a parameter for each expert of AutoEP's that the ranks of a part have stacked.
void add_experts(const FlatParameter& stack, std::size_t part, std::vector<FlatParameter>& out) {
  const auto shape = stack.parameter.shape.span();
  const Dims own(shape.subspan(1));
  const Index elements = volume(own);
  for (Index e = 0; e < shape[0]; ++e) {
    const Index number = static_cast<Index>(part) * shape[0] + e;
    FlatParameter expert{{expert_name(stack.parameter.name, number), own}, stack.group, {}, true};
    for (const Run& run : stack.runs) {
      const Index begin = std::max(run.begin, e * elements), end = std::min(run.end, (e + 1) * elements);
      if (begin < end)
        expert.runs.push_back({run.rank, begin - e * elements, end - e * elements, run.at + begin - run.begin});
    }
    out.push_back(std::move(expert));
  }
}

// Replaces an expert-parallel rank's local numbers of experts by global ones.
Group with_global_experts(const Group& group, Index part) {
  std::map<std::string_view, Index> experts;  // number of experts in each layer on one rank
  for (const NamedShape& p : group)
    if (const auto e = expert_number(p.name)) {
      Index& count = experts[std::string_view(p.name).substr(0, e->begin)];
      count = std::max(count, e->number + 1);
    }
  Group out = group;
  for (NamedShape& p : out)
    if (const auto e = expert_number(p.name)) {
      const Index count = experts[std::string_view(p.name).substr(0, e->begin)];
      p.name.replace(e->begin, e->end - e->begin, std::to_string(e->number + part * count));
    }
  return out;
}

}  // namespace

std::optional<ExpertNumber> expert_number(std::string_view name) {
  constexpr std::string_view kList = ".deepspeed_experts.";
  const std::size_t at = name.find(kList);
  if (at == std::string_view::npos) return std::nullopt;
  std::string_view rest = name.substr(at + kList.size());
  const auto number = take_number(rest);
  if (!number || *number >= kMaxExperts || !rest.starts_with('.')) return std::nullopt;
  return ExpertNumber{at + kList.size(), name.size() - rest.size(), *number};
}

std::string expert_name(const std::string& stacked, Index expert) { return stacked + "." + std::to_string(expert); }

Result<std::vector<FlatParameter>> find_parameters(const std::vector<RankStates>& ranks,
                                                   const std::vector<Group>& groups, const StackedExperts& stacked) {
  for (const RankStates& rank : ranks)
    if (rank.states.groups.size() != groups.size())
      return corrupt(rank.path + ": expected the vectors of " + count_of(std::ssize(groups), "group") +
                     ", as param_shapes has them, got " + std::to_string(rank.states.groups.size()));
  std::vector<FlatParameter> out;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    // Experts are cut over the ranks that hold the same ones: rank % parts.
    const Index cuts = cuts_of(ranks[0], g);
    for (const RankStates& rank : ranks)
      if (cuts == 0 || cuts_of(rank, g) != cuts) return counts_differ(rank, g, ranks.size());
    const bool has_experts = std::any_of(groups[g].begin(), groups[g].end(), [&](const NamedShape& p) {
      return expert_number(p.name) || stacked.contains(p.name);
    });
    const std::size_t parts = ranks.size() / cuts;
    if (parts * cuts != ranks.size() || (parts > 1 && !has_experts)) return counts_differ(ranks[0], g, ranks.size());
    for (const NamedShape& p : groups[g])
      if (const auto all = stacked.find(p.name);
          all != stacked.end() && all->second / static_cast<Index>(parts) != p.shape[0])
        return corrupt(ranks[0].path + ": " + group_text(g) + ": '" + printable(p.name) + "': expected " +
                       count_of(all->second, "expert") + " on " + count_of(parts, "rank") + ", got " +
                       with_commas(p.shape[0]) + " on each: files of two saves");
    for (const NamedShape& p : groups[g])
      if (stacked.contains(p.name) && p.shape[0] > kMaxExperts)
        return corrupt(ranks[0].path + ": " + group_text(g) + ": '" + printable(p.name) + "': expected at most " +
                       with_commas(kMaxExperts) + " experts, got " + with_commas(p.shape[0]));
    for (std::size_t part = 0; part < parts; ++part) {
      std::vector<std::size_t> of;
      for (std::size_t r = part; r < ranks.size(); r += parts) of.push_back(r);
      const Group group = parts > 1 ? with_global_experts(groups[g], part) : groups[g];
      std::vector<FlatParameter> found;
      TRY(ranks[0].states.cuts_parameters ? cut_parameters(ranks, of, g, group, found)
                                          : cut_vector(ranks, of, g, group, found));
      for (FlatParameter& p : found)
        if (stacked.contains(p.parameter.name))
          add_experts(p, part, out);
        else
          out.push_back(std::move(p));
    }
  }
  return out;
}

Result<std::vector<FlatParameter>> find_parameters(const std::vector<RankStates>& ranks,
                                                   const std::map<std::string, Dims>& shapes) {
  std::map<std::string, FlatParameter> found;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const OptimizerStates& states = ranks[r].states;
    if (states.slices.size() != states.groups.size())
      return corrupt(ranks[r].path + ": param_slice_mappings: expected " +
                     count_of(std::ssize(states.groups), "group") + ", got " + std::to_string(states.slices.size()) +
                     ", and nothing else names the parameters");
    for (std::size_t g = 0; g < states.slices.size(); ++g)
      for (const Slice& slice : states.slices[g]) {
        const auto shape = shapes.find(slice.name);
        if (shape == shapes.end())
          return corrupt(ranks[r].path + ": param_slice_mappings: '" + printable(slice.name) +
                         "' is not in the model states");
        FlatParameter& to =
            found.try_emplace(slice.name, FlatParameter{{slice.name, shape->second}, g, {}}).first->second;
        const Index begin = to.runs.empty() ? 0 : to.runs.back().end;
        if (to.group != g || slice.length > volume(shape->second) - begin)
          return corrupt(ranks[r].path + ": param_slice_mappings: '" + printable(slice.name) +
                         "': expected the rest of " + to_string(shape->second) + ", got " +
                         count_of(slice.length, "number") + " more");
        if (slice.length > 0) to.runs.push_back({r, begin, begin + slice.length, slice.start});
      }
  }
  std::vector<FlatParameter> out;
  for (auto& [name, parameter] : found) {
    if ((parameter.runs.empty() ? 0 : parameter.runs.back().end) != volume(parameter.parameter.shape))
      return corrupt(ranks[0].path + ": param_slice_mappings: '" + printable(name) + "': expected all of " +
                     to_string(parameter.parameter.shape) +
                     " on all ranks together: a rank's file belongs to another run");
    out.push_back(std::move(parameter));
  }
  return out;
}

}  // namespace reshard::deepspeed
