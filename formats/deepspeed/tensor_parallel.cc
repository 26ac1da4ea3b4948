// SPDX-License-Identifier: Apache-2.0
#include "formats/deepspeed/tensor_parallel.h"

#include "formats/tensor_files/joined_tensor.h"
#include "lib/base/checked.h"
#include "lib/base/text.h"

namespace reshard::deepspeed {
namespace {

using pickle::Kind;
using pickle::Value;

constexpr std::size_t kMaxSections = 64;

// Returns the name that Python's re.escape turned into this pattern, "^lm_head\.weight$", or nothing for other
// patterns.
std::optional<std::string> name_of_pattern(std::string_view pattern) {
  if (!take(pattern, "^") || !pattern.ends_with('$')) return std::nullopt;
  pattern.remove_suffix(1);
  std::string out;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (std::string_view("*+?[](){}|^$.").find(pattern[i]) != std::string_view::npos) return std::nullopt;
    const bool is_escaped = pattern[i] == '\\';
    if (is_escaped && ++i == pattern.size()) return std::nullopt;
    const char c = pattern[i];
    const bool is_word = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (is_escaped && is_word) return std::nullopt;  // "\d"
    out += c;
  }
  return out;
}

Status add_name(Value pattern, TensorParallelInfo& out, const std::function<void(std::string)>& add) {
  const auto text = pattern.as_string();
  if (!text) return pattern.mismatch("universal_checkpoint_info", "a pattern");
  if (auto name = name_of_pattern(*text))
    add(*std::move(name));
  else
    out.unknown_patterns.emplace(*text);
  return {};
}

Status read_names(Value info, std::string_view key, TensorParallelInfo& out, std::set<std::string>& names) {
  const auto list = info.find(key);
  if (!list || list->is_none()) return {};
  if (!list->is_sequence()) return list->mismatch(key, "a list of patterns");
  for (std::size_t i = 0; i < list->size(); ++i)
    TRY(add_name((*list)[i], out, [&](std::string name) { names.insert(std::move(name)); }));
  return {};
}

Result<std::vector<std::vector<Index>>> read_widths(Value lists) {
  constexpr std::string_view kWhat = "sub_param_shard_widths";
  if (!lists.is_sequence() || lists.size() > kMaxSections) return lists.mismatch(kWhat, "a list of widths");
  std::vector<std::vector<Index>> out;
  for (std::size_t s = 0; s < lists.size(); ++s) {
    const Value list = lists[s];
    if (!list.is_sequence() || std::ssize(list) > kMaxMeshRanks) return list.mismatch(kWhat, "widths");
    out.emplace_back();
    for (std::size_t r = 0; r < list.size(); ++r) {
      const auto width = list[r].as_int();
      if (!width || *width < 0) return list.mismatch(kWhat, "widths of 0 or more");
      out.back().push_back(*width);
    }
  }
  return out;
}

// Reads {"patterns": [...], "shape": ..., "partition_dim": 0}. The widths of its sections are in a separate member.
Status read_sections(Value info, TensorParallelInfo& out) {
  const auto list = info.find("parameter_with_sub_params");
  if (!list || list->is_none()) return {};
  if (!list->is_sequence()) return list->mismatch("parameter_with_sub_params", "a list");
  const auto widths = info.find("sub_param_shard_widths");
  for (std::size_t i = 0; i < list->size(); ++i) {
    const Value entry = (*list)[i];
    const auto patterns = entry.kind() == Kind::kDict ? entry.find("patterns") : std::nullopt;
    const auto dim = patterns ? entry.find("partition_dim") : std::nullopt;
    if (!dim || !dim->as_int() || *dim->as_int() < 0 || *dim->as_int() > 7 || !patterns->is_sequence()) {
      out.unknown_patterns.emplace("parameter_with_sub_params");  // an object, which Megatron-DeepSpeed may write
      continue;
    }
    for (std::size_t p = 0; p < patterns->size(); ++p) {
      const Value pattern = (*patterns)[p];
      PartCut cut;
      cut.dim = static_cast<int>(*dim->as_int());
      const auto text = pattern.as_string();
      const auto own = text && widths && widths->kind() == Kind::kDict ? widths->find(*text) : std::nullopt;
      if (own) cut.widths = TRY(read_widths(*own));
      TRY(add_name(pattern, out, [&](std::string name) {
        if (own)
          out.sections.insert_or_assign(std::move(name), cut);
        else
          out.unsupported.insert_or_assign(std::move(name), "the widths of its sections are not recorded");
      }));
    }
  }
  return {};
}

// Reads "affine_map": {"params": {pattern: {"ranks": {0: {"shard_shape": [12, 8], ...}}}}}. It is needed only if a
// rank's file cannot be read, so what is not of this form is ignored.
void read_shapes(Value info, TensorParallelInfo& out) {
  const auto dict = [](std::optional<Value> parent, std::string_view key) {
    const auto found = parent ? parent->find(key) : std::nullopt;
    return found && found->kind() == Kind::kDict ? found : std::nullopt;
  };
  const auto parameters = dict(dict(info, "affine_map"), "params");
  for (std::size_t p = 0; parameters && p < parameters->size(); ++p) {
    const auto pattern = parameters->key(p).as_string();
    const auto name = pattern ? name_of_pattern(*pattern) : std::nullopt;
    const Value parameter = parameters->value(p);
    const auto ranks = name && parameter.kind() == Kind::kDict ? dict(parameter, "ranks") : std::nullopt;
    for (std::size_t r = 0; ranks && r < ranks->size(); ++r) {
      const auto rank = ranks->key(r).as_int();
      const Value part = ranks->value(r);
      const auto sizes = rank && part.kind() == Kind::kDict ? part.find("shard_shape") : std::nullopt;
      if (!sizes || !sizes->is_sequence() || std::ssize(*sizes) > kMaxRank) continue;
      Dims shape = Dims::filled(static_cast<int>(sizes->size()), -1);
      for (std::size_t d = 0; d < sizes->size(); ++d) shape[static_cast<int>(d)] = (*sizes)[d].as_int().value_or(-1);
      if (checked_volume(shape)) out.shapes[*name][*rank] = shape;
    }
  }
}

}  // namespace

Result<TensorParallelInfo> read_tensor_parallel_info(Value info) {
  if (info.kind() != Kind::kDict) return info.mismatch("universal_checkpoint_info", "a dict");
  TensorParallelInfo out;
  TRY(read_names(info, "parameter_with_row_parallelism_patterns", out, out.rows));
  TRY(read_names(info, "tp_replicated_parameter_patterns", out, out.replicated));
  TRY(read_sections(info, out));
  read_shapes(info, out);
  if (const auto reasons = info.find("autotp_unsupported_parameter_patterns");
      reasons && reasons->kind() == Kind::kDict)
    for (std::size_t i = 0; i < reasons->size(); ++i) {
      const std::string why(reasons->value(i).as_string().value_or("AutoTP does not say how it is cut"));
      TRY(add_name(reasons->key(i), out,
                   [&](std::string name) { out.unsupported.insert_or_assign(std::move(name), why); }));
    }
  for (const char* const other : {"parameter_to_average_patterns", "parameter_with_2_sub_params_cat_dim_0"}) {
    std::set<std::string> names;
    TRY(read_names(info, other, out, names));
    for (const std::string& name : names)
      out.unsupported.insert_or_assign(name, std::string(other) + " names it, which Megatron-DeepSpeed writes");
  }
  return out;
}

PartCut TensorParallelInfo::cut_of(const std::string& name) const {
  if (replicated.contains(name)) return {};
  if (const auto found = sections.find(name); found != sections.end()) return found->second;
  PartCut cut;
  cut.dim = rows.contains(name) ? 1 : 0;
  return cut;
}

std::optional<Dims> TensorParallelInfo::shape_of(const std::string& name, Index rank) const {
  const auto parts = shapes.find(name);
  if (parts == shapes.end() || !parts->second.contains(rank)) return std::nullopt;
  return parts->second.at(rank);
}

Result<JoinedParts> join_parts(const PartCut& cut, const std::vector<Dims>& shapes) {
  JoinedParts out;
  out.shape = shapes[0];
  const int d = cut.dim;
  out.is_replicated = d < 0;
  const auto refuse = [&](std::size_t rank) {
    return corrupt("tensor-parallel rank " + std::to_string(rank) + " has " + to_string(shapes[rank]) +
                   " of it, rank 0 " + to_string(shapes[0]) + ": these are not parts of one parameter " +
                   (d < 0 ? "that every rank has" : "that is cut along dimension " + std::to_string(d)));
  };
  for (std::size_t r = 0; r < shapes.size(); ++r) {
    Dims same = shapes[r];
    if (d >= same.rank() || same.rank() != shapes[0].rank()) return refuse(r);
    if (d >= 0) same[d] = shapes[0][d];
    if (same != shapes[0]) return refuse(r);
  }
  if (d < 0) {
    const LocalBox all{whole(out.shape), Dims::filled(out.shape.rank(), 0)};
    out.of_rank.assign(shapes.size(), {all});
    return out;
  }
  std::vector<std::vector<Index>> widths = cut.widths;
  if (widths.empty()) widths.resize(cut.sections);
  for (std::size_t r = 0; r < shapes.size(); ++r) {
    Index sum = 0;
    for (std::vector<Index>& section : widths) {
      if (cut.widths.empty()) section.push_back(shapes[r][d] / cut.sections);
      if (section.size() <= r) return refuse(r);
      sum = checked_add(sum, section[r]).value_or(-1);
    }
    if (sum != shapes[r][d]) return refuse(r);
  }
  out.of_rank.resize(shapes.size());
  std::vector<Index> at(shapes.size(), 0);
  Index begin = 0;
  for (const std::vector<Index>& section : widths)
    for (std::size_t r = 0; r < shapes.size(); ++r) {
      LocalBox part{whole(shapes[r]), Dims::filled(shapes[r].rank(), 0)};
      part.box.shape[d] = section[r];
      part.box.origin[d] = begin;
      part.at[d] = at[r];
      const auto end = checked_add(begin, section[r]);
      if (!end) return corrupt("parts of 2^63 rows or more together");
      begin = *end;
      at[r] += section[r];
      if (section[r] > 0) out.of_rank[r].push_back(part);
    }
  out.shape[d] = begin;
  if (!checked_volume(out.shape)) return corrupt("parts that are " + to_string(out.shape) + " together");
  return out;
}

void add_part(std::optional<Tensor>& whole, const Tensor& part, const JoinedParts& parts, Index rank,
              bool with_copies) {
  const bool is_copy = parts.is_replicated && whole.has_value();
  if (is_copy && !with_copies) return;
  if (!whole) {
    whole = part;
    whole->shape = parts.shape;
    whole->fragments = whole->replicas = FragmentList(parts.shape.rank());
  }
  const auto add = [&](const FragmentList& from, FragmentList& to) {
    for (std::size_t i = 0; i < from.size(); ++i)
      for (const LocalBox& box : parts.of_rank[rank])
        if (const auto held = in_whole(from.get(i), box, byte_size(part.dtype))) to.add(*held);
  };
  add(part.fragments, is_copy ? whole->replicas : whole->fragments);
  add(part.replicas, whole->replicas);
}

}  // namespace reshard::deepspeed
