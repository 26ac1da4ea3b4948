// SPDX-License-Identifier: Apache-2.0
#include "lib/model/packing.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "lib/base/text.h"
#include "lib/model/formula.h"

namespace reshard {
namespace {

constexpr Index kMaxExperts = 65'536;  // in one stack; limits what a forged shape can request

// Canonical row n*D + t*(D/2) + j of head n is stored as row base + 2j + t (t = 0, 1).
void add_rotary_head(std::vector<RowSegment>& out, Index canonical, Index stored, Index head_dim) {
  out.push_back({canonical, stored, head_dim / 2, 2});
  out.push_back({canonical + head_dim / 2, stored + 1, head_dim / 2, 2});
}

// Returns the fragments of a tensor with renumbered rows. `rows` ascends in its stored rows, within one head.
FragmentList map_rows(const FragmentList& in, const std::vector<RowSegment>& rows, int rank, Index element_bytes) {
  FragmentList out(rank);
  // The furthest that a segment reaches from its first stored row.
  Index reach = 0;
  for (const RowSegment& s : rows) reach = std::max(reach, s.count * s.step);
  for (std::size_t i = 0; i < in.size(); ++i) {
    const Fragment f = in.get(i);
    if (f.box.empty()) continue;
    const Index begin = f.box.begin(0), end = f.box.end(0);
    auto s = std::lower_bound(rows.begin(), rows.end(), begin - reach,
                              [](const RowSegment& row, Index stored) { return row.stored < stored; });
    for (; s != rows.end() && s->stored < end; ++s) {
      const Index first = begin <= s->stored ? 0 : ceil_div(begin - s->stored, s->step);
      const Index last = std::min(s->count, ceil_div(end - s->stored, s->step));
      if (first >= last) continue;
      Fragment part = f;
      part.box.origin[0] = s->canonical + first;
      part.box.shape[0] = last - first;
      part.start += (s->stored + first * s->step - begin) * f.strides[0] * element_bytes;
      part.strides[0] *= s->step;
      out.add(part);
    }
  }
  return out;
}

Dims without_first(const Dims& dims) { return Dims(dims.span().subspan(1)); }

// Returns the fragments that contain `index` in the first dimension, without that dimension.
FragmentList slice(const FragmentList& in, Index index, int rank, Index element_bytes) {
  FragmentList out(rank - 1);
  for (std::size_t i = 0; i < in.size(); ++i) {
    const Fragment f = in.get(i);
    if (f.box.empty() || index < f.box.begin(0) || index >= f.box.end(0)) continue;
    Fragment part = f;
    part.start += (index - f.box.begin(0)) * f.strides[0] * element_bytes;
    part.box = {without_first(f.box.origin), without_first(f.box.shape)};
    part.strides = without_first(f.strides);
    out.add(part);
  }
  return out;
}

void swap_last_two(Dims& dims) { std::swap(dims[dims.rank() - 1], dims[dims.rank() - 2]); }

FragmentList transpose(const FragmentList& in, int rank) {
  FragmentList out(rank);
  for (std::size_t i = 0; i < in.size(); ++i) {
    Fragment f = in.get(i);
    for (Dims* dims : {&f.box.origin, &f.box.shape, &f.strides}) swap_last_two(*dims);
    out.add(f);
  }
  return out;
}

FragmentList shift_last(const FragmentList& in, Index by, int rank) {
  FragmentList out(rank);
  for (std::size_t i = 0; i < in.size(); ++i) {
    Fragment f = in.get(i);
    f.box.origin[rank - 1] += by;
    out.add(f);
  }
  return out;
}

FragmentList part_fragments(const FragmentList& in, const PackedPart& part, int rank, Index element_bytes) {
  FragmentList out = part.index < 0 ? in : slice(in, part.index, rank, element_bytes);
  if (part.index >= 0) --rank;
  if (!part.rows.empty()) out = map_rows(out, part.rows, rank, element_bytes);
  if (part.transposed) out = transpose(out, rank);
  return part.first > 0 ? shift_last(out, part.first, rank) : out;
}

std::string times(std::string_view a, Index x, std::string_view b, Index y) {
  return std::string(a) + " " + std::to_string(x) + " x " + std::string(b) + " " + std::to_string(y);
}

// `what` is the tensor in messages.
Result<const ModelConfig*> need_head_counts(const ModelConfig* config, const std::string& what) {
  if (config) return config;
  return usage_error(what +
                     ": its rows are ordered by attention head, and no config.json gives the number of heads; "
                     "add one with --config");
}

Result<std::vector<Index>> section_sizes(const StoredRule& stored, const ModelConfig* config, const std::string& what) {
  if (!config)
    return usage_error(what +
                       ": is one section of a tensor, and no config.json gives the sizes of the others; add one " +
                       "with --config");
  std::vector<Index> out;
  for (const std::string& formula : stored.sections) {
    const Index n = TRY(evaluate(formula, config->numbers()).context(config->path).context(what));
    if (n < 1) return corrupt(config->path + ": " + explain(formula, config->numbers()) + ": expected a positive size");
    out.push_back(n);
  }
  return out;
}

// Computes the parts of one tensor.
class Unpacker {
 public:
  Unpacker(const ParsedName& name, const Dims& shape, const ModelConfig* config, bool hf_rows, const std::string& what)
      : name_(name), form_(name.stored->form), shape_(shape), config_(config), hf_rows_(hf_rows), what_(what) {}

  Result<std::vector<PackedPart>> parts() {
    switch (form_) {
      case Form::kRotaryQuery:
        return rotary("num_attention_heads");
      case Form::kRotaryKey:
        return rotary("num_key_value_heads");
      case Form::kQkvByGroup:
      case Form::kRotaryQkvByGroup:
        return by_group();
      case Form::kQkv:
        return one_after_the_other();
      case Form::kQkvOfGroups:
        return of_groups();
      case Form::kSection:
      case Form::kTransposedSection:
        return section();
      case Form::kSections:
        return sections();
      case Form::kStacked:
      case Form::kStackedSections:
        return stacked();
      case Form::kTransposed:
        return transposed();
      case Form::kTransposedQkv:
        return transposed_by_head();
      case Form::kSame:
      case Form::kDropped:
        break;
    }
    return internal_error(what_ + ": expected a packed tensor");
  }

 private:
  std::string part_name(std::size_t part, Index expert) const {
    return format_pattern(name_.stored->parts[part], name_.layer, expert);
  }

  Status check_rows(Index expected, const ModelConfig& config, const std::string& arithmetic) const {
    if (shape_[0] == expected) return {};
    return corrupt(what_ + ": " + config.path + " says " + count_of(expected, "row") + " (" + arithmetic +
                   "), got shape " + to_string(shape_));
  }

  // Checks the rows of query, key and value: one row for each number of a head.
  Status check_head_rows(const ModelConfig& c) const {
    const Index d = c.head_dim(), heads = c.num_attention_heads(), kv_heads = c.num_key_value_heads();
    return check_rows((heads + 2 * kv_heads) * d, c,
                      "(num_attention_heads " + std::to_string(heads) + " + 2 x num_key_value_heads " +
                          std::to_string(kv_heads) + ") x head_dim " + std::to_string(d));
  }

  // Returns the config, if its heads can be in rotary pairs.
  Result<const ModelConfig*> need_pairs() const {
    const ModelConfig* config = TRY(need_head_counts(config_, what_));
    if (config->head_dim() % 2 == 0) return config;
    return corrupt(config->path + ": head_dim " + std::to_string(config->head_dim()) +
                   " is odd; a rotary embedding needs pairs");
  }

  Result<std::vector<PackedPart>> rotary(std::string_view counted) {
    PackedPart part{part_name(0, name_.expert), shape_, -1, {}, false, 1};
    if (hf_rows_) {
      const ModelConfig& c = *TRY(need_pairs());
      const Index heads = c.number(counted), d = c.head_dim();
      TRY(check_rows(heads * d, c, times(counted, heads, "head_dim", d)));
      for (Index n = 0; n < heads; ++n) add_rotary_head(part.rows, n * d, n * d, d);
      part.row_group = d;
    }
    return std::vector{std::move(part)};
  }

  // Row ((kv * R + s) * D + i), where each key-value head has R = g + 2 blocks: g query heads, the key, the value.
  Result<std::vector<PackedPart>> by_group() {
    const bool pairs = form_ == Form::kRotaryQkvByGroup && hf_rows_;
    const ModelConfig& c = *TRY(pairs ? need_pairs() : need_head_counts(config_, what_));
    const Index d = c.head_dim(), heads = c.num_attention_heads(), kv_heads = c.num_key_value_heads();
    TRY(check_head_rows(c));
    const Index group = heads / kv_heads, blocks = group + 2;
    const std::array<Index, 3> head_counts = {heads, kv_heads, kv_heads};
    std::vector<PackedPart> out;
    for (std::size_t p = 0; p < 3; ++p) {
      PackedPart part{part_name(p, name_.expert), shape_, -1, {}, false, d};
      part.shape[0] = head_counts[p] * d;
      out.push_back(std::move(part));
    }
    const auto add = [&](std::size_t p, Index head, Index block) {
      if (pairs && p < 2)
        add_rotary_head(out[p].rows, head * d, block * d, d);
      else
        out[p].rows.push_back({head * d, block * d, d, 1});
    };
    for (Index kv = 0; kv < kv_heads; ++kv) {
      for (Index s = 0; s < group; ++s) add(0, kv * group + s, kv * blocks + s);
      add(1, kv, kv * blocks + group);
      add(2, kv, kv * blocks + group + 1);
    }
    return out;
  }

  Result<std::vector<PackedPart>> one_after_the_other() {
    const ModelConfig& c = *TRY(need_head_counts(config_, what_));
    const Index d = c.head_dim(), heads = c.num_attention_heads(), kv_heads = c.num_key_value_heads();
    TRY(check_head_rows(c));
    std::vector<PackedPart> out;
    Index begin = 0;
    for (std::size_t p = 0; p < 3; ++p) {
      PackedPart part{part_name(p, name_.expert), shape_, -1, {}, false, 1};
      part.shape[0] = (p == 0 ? heads : kv_heads) * d;
      part.rows = {{0, begin, part.shape[0], 1}};
      begin += part.shape[0];
      out.push_back(std::move(part));
    }
    return out;
  }

  // Stored block b of q | k | v is block kv * R + s of the part, with R and s as in by_group().
  Result<std::vector<PackedPart>> of_groups() {
    const ModelConfig& c = *TRY(need_head_counts(config_, what_));
    const Index d = c.head_dim(), heads = c.num_attention_heads(), kv_heads = c.num_key_value_heads();
    TRY(check_head_rows(c));
    const Index group = heads / kv_heads, blocks = group + 2;
    PackedPart part{part_name(0, name_.expert), shape_, -1, {}, false, d};
    const auto add = [&](Index block, Index stored) { part.rows.push_back({block * d, stored * d, d, 1}); };
    for (Index head = 0; head < heads; ++head) add(head / group * blocks + head % group, head);
    for (Index kv = 0; kv < kv_heads; ++kv) add(kv * blocks + group, heads + kv);
    for (Index kv = 0; kv < kv_heads; ++kv) add(kv * blocks + group + 1, heads + kv_heads + kv);
    return std::vector{std::move(part)};
  }

  Result<std::vector<PackedPart>> section() {
    const StoredRule& stored = *name_.stored;
    const std::vector<Index> sizes = TRY(section_sizes(stored, config_, what_));
    const bool transposed = form_ == Form::kTransposedSection;
    const int stored_dim = transposed ? shape_.rank() - 2 : 0;
    if (stored_dim < 0 || shape_[stored_dim] != sizes[stored.section])
      return corrupt(what_ + ": " + config_->path + " says " + std::to_string(sizes[stored.section]) + " (" +
                     stored.sections[stored.section] + ") in dimension " + std::to_string(std::max(stored_dim, 0)) +
                     ", got shape " + to_string(shape_));
    const auto here = sizes.begin() + static_cast<std::ptrdiff_t>(stored.section);
    const Index before = std::accumulate(sizes.begin(), here, Index{0});
    const Index all = std::accumulate(here, sizes.end(), before);
    PackedPart part{part_name(0, name_.expert), shape_, -1, {}, transposed, 1};
    if (transposed) {
      swap_last_two(part.shape);
      part.shape[part.shape.rank() - 1] = all;
      part.first = before;
    } else {
      part.shape[0] = all;
      part.rows = {{before, 0, shape_[0], 1}};
    }
    return std::vector{std::move(part)};
  }

  Result<std::vector<PackedPart>> sections() {
    const Index n = std::ssize(name_.stored->parts);
    if (shape_[0] % n != 0)
      return corrupt(what_ + ": expected rows in " + std::to_string(n) + " equal sections, got shape " +
                     to_string(shape_));
    std::vector<PackedPart> out;
    for (Index p = 0; p < n; ++p) {
      PackedPart part{part_name(static_cast<std::size_t>(p), name_.expert), shape_, -1, {}, false, 1};
      part.shape[0] = shape_[0] / n;
      part.rows = {{0, p * part.shape[0], part.shape[0], 1}};
      out.push_back(std::move(part));
    }
    return out;
  }

  Result<std::vector<PackedPart>> stacked() {
    if (shape_[0] > kMaxExperts)
      return corrupt(what_ + ": expected at most " + with_commas(kMaxExperts) + " experts, got shape " +
                     to_string(shape_));
    const Index sections = std::ssize(name_.stored->parts);
    Dims shape = without_first(shape_);
    if (sections > 1 && (shape.rank() == 0 || shape[0] % sections != 0))
      return corrupt(what_ + ": expected each expert's rows in " + std::to_string(sections) +
                     " equal sections, got shape " + to_string(shape_));
    if (sections > 1) shape[0] /= sections;
    std::vector<PackedPart> out;
    for (Index e = 0; e < shape_[0]; ++e)
      for (Index s = 0; s < sections; ++s) {
        out.push_back({part_name(static_cast<std::size_t>(s), e), shape, e, {}, false, 1});
        if (sections > 1) out.back().rows = {{0, s * shape[0], shape[0], 1}};
      }
    return out;
  }

  Result<std::vector<PackedPart>> transposed() {
    PackedPart part{part_name(0, name_.expert), shape_, -1, {}, false, 1};
    if (shape_.rank() >= 2) {
      swap_last_two(part.shape);
      part.transposed = true;
    }
    return std::vector{std::move(part)};
  }

  // Row ((n * 3 + s) * D + i) is column s * H + n * D + i of q | k | v.
  Result<std::vector<PackedPart>> transposed_by_head() {
    const ModelConfig& c = *TRY(need_head_counts(config_, what_));
    const Index d = c.head_dim(), heads = c.num_attention_heads();
    TRY(check_rows(3 * heads * d, c, "3 x " + times("num_attention_heads", heads, "head_dim", d)));
    std::vector<PackedPart> out = TRY(transposed());
    for (Index n = 0; n < heads; ++n)
      for (Index s = 0; s < 3; ++s) out[0].rows.push_back({(s * heads + n) * d, (n * 3 + s) * d, d, 1});
    return out;
  }

  const ParsedName& name_;
  const Form form_;
  const Dims& shape_;
  const ModelConfig* config_;
  const bool hf_rows_;
  const std::string& what_;
};

}  // namespace

Tensor unpack(const Tensor& packed, const PackedPart& part, std::string name) {
  Tensor out;
  out.name = std::move(name);
  out.dtype = packed.dtype;
  out.model_dtype = packed.model_dtype;
  out.shape = part.shape;
  out.fragments = part_fragments(packed.fragments, part, packed.shape.rank(), byte_size(packed.dtype));
  out.replicas = part_fragments(packed.replicas, part, packed.shape.rank(), byte_size(packed.dtype));
  out.path = packed.path;
  out.located = packed.located;
  out.row_group = part.row_group;
  return out;
}

std::vector<std::string> part_names(const ParsedName& name, Index experts) {
  std::vector<std::string> out;
  const StoredRule& stored = *name.stored;
  if (stored.is_stacked()) {
    for (Index e = 0; e < std::min(experts, kMaxExperts); ++e)
      for (const std::string& part : stored.parts) out.push_back(format_pattern(part, name.layer, e));
    return out;
  }
  for (const std::string& part : stored.parts) out.push_back(format_pattern(part, name.layer, name.expert));
  return out;
}

Result<std::vector<PackedPart>> parts_of(const ParsedName& name, const Dims& shape, const ModelConfig* config,
                                         bool hf_rows, const std::string& what) {
  if (shape.rank() == 0) return corrupt(what + ": expected at least one dimension, got none");
  return Unpacker(name, shape, config, hf_rows, what).parts();
}

Result<Dims> packed_shape(const StoredRule& stored, std::span<const Dims> parts, const ModelConfig* config) {
  Dims out = parts[0];
  if (stored.is_section()) {
    const int dim = stored.form == Form::kSection ? 0 : out.rank() - 1;
    out[dim] = TRY(section_sizes(stored, config, "'" + stored.stored + "'"))[stored.section];
    if (stored.form == Form::kTransposedSection && out.rank() >= 2) swap_last_two(out);
    return out;
  }
  const auto refuse = [&](const Dims& part) {
    return unsupported("parts of shapes " + to_string(parts[0]) + " and " + to_string(part) +
                       " do not form one tensor");
  };
  if (stored.form == Form::kTransposed || stored.form == Form::kTransposedQkv) {
    if (out.rank() >= 2) swap_last_two(out);
    return out;
  }
  if (stored.is_stacked()) {
    for (const Dims& part : parts)
      if (part != parts[0]) return refuse(part);
    if (out.rank() == kMaxRank) return unsupported("a stack of tensors of " + std::to_string(kMaxRank) + " dimensions");
    const auto sections = std::ssize(stored.parts);
    Dims stacked{std::ssize(parts) / sections};
    if (out.rank() > 0) out[0] *= sections;
    for (int d = 0; d < out.rank(); ++d) stacked.push_back(out[d]);
    return stacked;
  }
  for (const Dims& part : parts.subspan(1)) {
    Dims same = part;
    if (part.rank() == 0 || part.rank() != out.rank()) return refuse(part);
    same[0] = parts[0][0];
    if (same != parts[0] || (stored.form == Form::kSections && part != parts[0])) return refuse(part);
    out[0] += part[0];
  }
  return out;
}

Result<std::vector<PackedGroup>> pack(const Family& family, Convention convention, const Catalog& view,
                                      const std::vector<std::size_t>& tensors) {
  struct Open {
    std::size_t group = 0;
    ParsedName name;  // of the packed tensor
    StateKey key;
    std::map<std::string, std::size_t> parts;
  };
  std::vector<PackedGroup> out;
  std::map<std::string, Open> open;
  for (const std::size_t i : tensors) {
    const std::string& canonical = view.tensors()[i].name;
    const StateKey key = split_state_key(canonical);
    const auto parsed = key.parameter.empty() ? std::nullopt : parse_name(family, key.parameter);
    const bool has_rule = parsed && !parsed->is_of_quantized();
    const StoredRule* stored = has_rule ? stored_rule(family, *parsed->rule, convention, parsed->layer) : nullptr;
    const std::string name = rename_key(family, canonical, convention);
    if (stored && stored->is_section()) {
      for (const StoredRule* section : stored_sections(family, *parsed->rule, convention, parsed->layer))
        out.push_back(
            {key.prefix + stored_name(family, *section, parsed->layer, parsed->expert) + key.suffix, section, {i}});
      continue;
    }
    if (!stored || !stored->is_packed()) {
      out.push_back({name, nullptr, {i}});
      continue;
    }
    ParsedName packed = *parsed;
    packed.stored = stored;
    const auto [it, is_new] = open.try_emplace(name, Open{out.size(), packed, key, {}});
    if (is_new) out.push_back({name, stored, {}});
    it->second.parts.emplace(key.parameter, i);
  }
  for (const auto& [name, group] : open) {
    const StoredRule& stored = *group.name.stored;
    const Index experts = ceil_div(std::ssize(group.parts), std::ssize(stored.parts));
    for (const std::string& part : part_names(group.name, experts)) {
      const auto found = group.parts.find(part);
      if (found == group.parts.end())
        return unsupported(tensor_text(name) + " of the output consists of several tensors; '" +
                           printable(group.key.prefix + part + group.key.suffix) + "' is missing");
      out[group.group].parts.push_back(found->second);
    }
    if (out[group.group].parts.size() != group.parts.size())
      return unsupported(tensor_text(name) + " of the output consists of " +
                         count_of(std::ssize(out[group.group].parts), "tensor") + ", got " +
                         with_commas(std::ssize(group.parts)));
  }
  return out;
}

std::vector<std::string> canonical_keys(const Family& family, const Catalog& catalog, const ModelConfig* config,
                                        std::string_view key) {
  const StateKey parts = split_state_key(key);
  const auto parsed = parts.parameter.empty() ? std::nullopt : parse_name(family, parts.parameter);
  if (!parsed || !parsed->is_packed()) return {canonical_key(family, key)};
  const auto parameter = catalog.find_parameter(parts.parameter);
  Index experts = config ? config->number("num_experts") : 0;
  if (parameter && catalog.tensors()[*parameter].shape.rank() > 0) experts = catalog.tensors()[*parameter].shape[0];
  std::vector<std::string> out = part_names(*parsed, experts);
  for (std::string& name : out) name = parts.prefix + name + parts.suffix;
  return out;
}

}  // namespace reshard
