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

// A run of a part's indices along one dimension, and where in a fragment they are stored, in elements.
struct AxisRun {
  Index origin = 0, count = 0, start = 0, stride = 0;
};

// Adds the runs of one quotient, whose remainders [begin, begin + count) of `all` are stored from `start` on.
void add_remainders(std::vector<AxisRun>& out, Index quotient, Index all, Index begin, Index count, Index start,
                    Index stride, bool pairs) {
  if (!pairs) {
    out.push_back({quotient * all + begin, count, start, stride});
    return;
  }
  for (Index t = 0; t < 2; ++t) {  // remainder t * all / 2 + j is stored as 2j + t
    const Index skipped = begin % 2 == t ? 0 : 1;
    if (count <= skipped) continue;
    out.push_back({quotient * all + t * (all / 2) + (begin + skipped) / 2, ceil_div(count - skipped, 2),
                   start + skipped * stride, 2 * stride});
  }
}

// Returns the runs along dimension `dim` of the part in a fragment of a tensor of shape `stored`.
std::vector<AxisRun> runs_of(const Fragment& f, const Dims& stored, const PackedPart& part, int dim) {
  if (part.columns > 1 && dim == part.shape.rank() - 1) return {{part.first, 1, 0, 1}};
  std::vector<int> at;  // the axes that the dimension is split into, the outermost first
  for (std::size_t a = 0; a < part.axes.size(); ++a)
    if (part.axes[a].dim == dim) at.push_back(static_cast<int>(a));
  Index all = stored[at.back()], begin = f.box.begin(at.back()), count = f.box.shape[at.back()];
  const Index stride = f.strides[at.back()];
  const bool pairs = part.pairs && at.size() > 1;  // of the rows of a head
  at.pop_back();
  // Inner axes that are whole and follow each other in memory are one.
  while (!at.empty() && !pairs && count == all && f.strides[at.back()] == all * stride) {
    begin = f.box.begin(at.back()) * all;
    count *= f.box.shape[at.back()];
    all *= stored[at.back()];
    at.pop_back();
  }
  if (at.empty()) return {{begin, count, 0, stride}};
  std::vector<AxisRun> quotients = {{0, 1, 0, 0}};
  for (const int axis : at) {
    std::vector<AxisRun> next;
    for (const AxisRun& outer : quotients)
      for (Index i = 0; i < f.box.shape[axis]; ++i)
        next.push_back({outer.origin * stored[axis] + f.box.begin(axis) + i, 1, outer.start + i * f.strides[axis], 0});
    quotients = std::move(next);
  }
  std::vector<AxisRun> out;
  for (const AxisRun& q : quotients) add_remainders(out, q.origin, all, begin, count, q.start, stride, pairs);
  return out;
}

// Returns where in the fragment the part begins, in elements; nothing if the fragment has nothing of it.
std::optional<Index> start_in(const Fragment& f, const PackedPart& part) {
  if (f.box.empty()) return std::nullopt;
  Index start = 0;
  for (std::size_t a = 0; a < part.axes.size(); ++a) {
    if (part.axes[a].of == StoredAxis::Of::kPart) continue;
    const int axis = static_cast<int>(a);
    const Index at = part.at(part.axes[a].of);
    if (at < f.box.begin(axis) || at >= f.box.end(axis)) return std::nullopt;
    start += (at - f.box.begin(axis)) * f.strides[axis];
  }
  return start;
}

// Returns the box of the part in the stored tensor.
Box box_of(const PackedPart& part, const Dims& stored) {
  Box out = whole(stored);
  for (std::size_t a = 0; a < part.axes.size(); ++a) {
    if (part.axes[a].of == StoredAxis::Of::kPart) continue;
    const int axis = static_cast<int>(a);
    out.origin[axis] = part.at(part.axes[a].of);
    out.shape[axis] = 1;
  }
  return out;
}

// Returns the fragments of a part of Form::kAxes: one for each combination of runs. `index` must be the index of `in`.
// It saves looking at all fragments for each part: a tensor of all experts has as many parts as fragments, or fewer.
FragmentList by_axes(const FragmentList& in, const FragmentIndex& index, const Dims& stored, const PackedPart& part,
                     Index element_bytes) {
  const int rank = part.shape.rank();
  FragmentList out(rank);
  index.overlapping(box_of(part, stored), [&](std::size_t i, const Box&) {
    const Fragment f = in.get(i);
    const auto start = start_in(f, part);
    if (!start) return;
    std::vector<std::vector<AxisRun>> runs;
    Index combinations = 1;
    for (int d = 0; d < rank; ++d) combinations *= std::ssize(runs.emplace_back(runs_of(f, stored, part, d)));
    for (Index n = 0; n < combinations; ++n) {
      Fragment one = f;
      one.box = {Dims::filled(rank, 0), Dims::filled(rank, 0)};
      one.strides = Dims::filled(rank, 0);
      Index rest = n, offset = *start;
      for (int d = rank - 1; d >= 0; --d) {
        const std::vector<AxisRun>& of = runs[d];
        const AxisRun& run = of[rest % std::ssize(of)];
        rest /= std::ssize(of);
        one.box.origin[d] = run.origin;
        one.box.shape[d] = run.count;
        one.strides[d] = run.stride;
        offset += run.start;
      }
      one.start += offset * element_bytes;
      out.add(one);
    }
  });
  return out;
}

FragmentList part_fragments(const FragmentList& in, const std::optional<FragmentIndex>& index, const Dims& stored,
                            const PackedPart& part, Index element_bytes) {
  if (!part.axes.empty()) return by_axes(in, *index, stored, part, element_bytes);
  int rank = stored.rank();
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
      case Form::kAxes:
        return axes();
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
    const auto here = sizes.begin() + stored.section;
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
      PackedPart part{part_name(p, name_.expert), shape_, -1, {}, false, 1};
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
        out.push_back({part_name(s, e), shape, e, {}, false, 1});
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

  Status check_axis(std::size_t a, Index expected, const std::string& why) const {
    if (shape_[static_cast<int>(a)] == expected) return {};
    return corrupt(what_ + ": " + (config_ ? config_->path : "config.json") + " says " + with_commas(expected) + " (" +
                   why + ") in dimension " + std::to_string(a) + ", got shape " + to_string(shape_));
  }

  // Checks the axes and returns the part's shape.
  Result<Dims> part_shape() const {
    const StoredRule& stored = *name_.stored;
    if (static_cast<std::size_t>(shape_.rank()) != stored.axes.size())
      return corrupt(what_ + ": expected " + count_of(std::ssize(stored.axes), "dimension") + ", got shape " +
                     to_string(shape_));
    int rank = 0;
    for (const StoredAxis& axis : stored.axes) rank = std::max(rank, axis.dim + 1);
    Dims out = Dims::filled(rank, 1);
    for (std::size_t a = 0; a < stored.axes.size(); ++a) {
      const StoredAxis& axis = stored.axes[a];
      const Index extent = shape_[static_cast<int>(a)];
      if (axis.of == StoredAxis::Of::kLayers) TRY(check_axis(a, stored.layers.count(), "layers"));
      if (axis.of == StoredAxis::Of::kParts) TRY(check_axis(a, std::ssize(stored.parts), "parts"));
      if (axis.of == StoredAxis::Of::kExperts && extent > kMaxExperts)
        return corrupt(what_ + ": expected at most " + with_commas(kMaxExperts) + " experts, got shape " +
                       to_string(shape_));
      if (axis.of != StoredAxis::Of::kPart) continue;
      out[axis.dim] *= extent;
      if (!axis.size.empty() && config_)
        TRY(check_axis(a, TRY(evaluate(axis.size, config_->numbers()).context(config_->path)), axis.size));
    }
    if (stored.columns > 1) out.push_back(stored.columns);
    return out;
  }

  Index extent_of(StoredAxis::Of of) const {
    const auto& axes = name_.stored->axes;
    const auto axis = std::find_if(axes.begin(), axes.end(), [&](const StoredAxis& a) { return a.of == of; });
    return axis == axes.end() ? Index{1} : shape_[static_cast<int>(axis - axes.begin())];
  }

  Result<std::vector<PackedPart>> axes() const {
    const StoredRule& stored = *name_.stored;
    if (stored.has_layers() && stored.layers.end < 0)
      return usage_error(what_ + ": holds several layers, and no config.json says how many there are; give one with " +
                         "--config");
    PackedPart part;
    part.shape = TRY(part_shape());
    part.axes = stored.axes;
    part.columns = stored.columns;
    part.first = stored.section;
    part.pairs = stored.pairs && hf_rows_;
    if (part.pairs) {
      part.row_group = shape_[shape_.rank() - 1];
      if (part.row_group % 2 != 0)
        return corrupt(what_ + ": expected an even last dimension for rotary pairs, got shape " + to_string(shape_));
    }
    const Index layers = extent_of(StoredAxis::Of::kLayers);
    std::vector<PackedPart> out;
    for (std::string& name : part_names(name_, extent_of(StoredAxis::Of::kExperts))) {
      const Index i = std::ssize(out) / std::ssize(stored.parts);
      part.name = std::move(name);
      part.number = std::ssize(out) % std::ssize(stored.parts);
      part.layer = i % layers;
      part.expert = i / layers;
      out.push_back(part);
    }
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

PackedParts::PackedParts(const Tensor& packed, std::span<const PackedPart> parts) : packed_(packed) {
  if (parts.empty() || parts[0].axes.empty()) return;  // all parts of a tensor have one form
  fragments_.emplace(packed.fragments);
  replicas_.emplace(packed.replicas);
}

Tensor PackedParts::unpack(const PackedPart& part, std::string name) const {
  const Tensor& packed = packed_;
  Tensor out;
  out.name = std::move(name);
  out.dtype = packed.dtype;
  out.model_dtype = packed.model_dtype;
  out.shape = part.shape;
  out.fragments = part_fragments(packed.fragments, fragments_, packed.shape, part, byte_size(packed.dtype));
  out.replicas = part_fragments(packed.replicas, replicas_, packed.shape, part, byte_size(packed.dtype));
  out.path = packed.path;
  out.located = packed.located;
  out.row_group = part.row_group;
  out.columns = part.columns;
  return out;
}

Tensor unpack(const Tensor& packed, const PackedPart& part, std::string name) {
  return PackedParts(packed, {&part, 1}).unpack(part, std::move(name));
}

std::vector<std::string> part_names(const ParsedName& name, Index experts) {
  std::vector<std::string> out;
  const StoredRule& stored = *name.stored;
  if (stored.form == Form::kAxes) {
    const Index layers = stored.has_layers() ? stored.layers.count() : 1;
    const Index all = stored.has_experts() ? std::min(experts, kMaxExperts) : 1;
    for (Index e = 0; e < all; ++e)
      for (Index n = 0; n < layers; ++n)
        for (const std::string& part : stored.parts)
          out.push_back(format_pattern(part, stored.has_layers() ? stored.layers.layer(n) : name.layer,
                                       stored.has_experts() ? e : name.expert));
    return out;
  }
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

namespace {

Result<Dims> shape_by_axes(const StoredRule& stored, std::span<const Dims> parts, const ModelConfig* config) {
  const std::string what = "'" + stored.stored + "'";
  for (const Dims& part : parts)
    if (part != parts[0])
      return unsupported("parts of shapes " + to_string(parts[0]) + " and " + to_string(part) +
                         " do not make one tensor");
  const Index layers = stored.has_layers() ? std::max<Index>(1, stored.layers.count()) : 1;
  Dims rest = parts[0], out;
  for (const StoredAxis& axis : stored.axes)
    if (axis.dim >= rest.rank()) return unsupported(what + " cannot be made of a tensor of shape " + to_string(rest));
  if (rest.rank() > 0) rest[rest.rank() - 1] /= stored.columns;
  for (const StoredAxis& axis : stored.axes) {
    Index extent = std::ssize(stored.parts);
    if (axis.of == StoredAxis::Of::kLayers) extent = layers;
    if (axis.of == StoredAxis::Of::kExperts) extent = std::ssize(parts) / layers / std::ssize(stored.parts);
    if (axis.of == StoredAxis::Of::kPart) extent = rest[axis.dim];
    if (!axis.size.empty()) {
      const ModelConfig& c = *TRY(need_head_counts(config, what));
      extent = TRY(evaluate(axis.size, c.numbers()).context(c.path));
      if (extent < 1 || rest[axis.dim] % extent != 0)
        return corrupt(c.path + ": " + axis.size + " " + std::to_string(extent) + " does not divide " + what +
                       ", which is made of tensors of shape " + to_string(parts[0]));
      rest[axis.dim] /= extent;
    }
    out.push_back(extent);
  }
  return out;
}

}  // namespace

Result<Dims> packed_shape(const StoredRule& stored, std::span<const Dims> parts, const ModelConfig* config) {
  if (stored.form == Form::kAxes) return shape_by_axes(stored, parts, config);
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
    const auto rules =
        has_rule ? stored_sections(family, *parsed->rule, convention, parsed->layer) : std::vector<const StoredRule*>();
    if (rules.empty() || !rules[0]->is_packed()) {
      out.push_back({rename_key(family, canonical, convention), nullptr, {i}});
      continue;
    }
    for (const StoredRule* const stored : rules) {
      const std::string name = key.prefix + stored_name(family, *stored, parsed->layer, parsed->expert) + key.suffix;
      if (stored->is_section() && stored->form != Form::kAxes) {
        out.push_back({name, stored, {i}});
        continue;
      }
      ParsedName packed = *parsed;
      packed.stored = stored;
      const auto [it, is_new] = open.try_emplace(name, Open{out.size(), packed, key, {}});
      if (is_new) out.push_back({name, stored, {}});
      it->second.parts.emplace(key.parameter, i);
    }
  }
  for (const auto& [name, group] : open) {
    const StoredRule& stored = *group.name.stored;
    const Index layers = stored.has_layers() ? std::max<Index>(1, stored.layers.count()) : 1;
    const Index experts = ceil_div(std::ssize(group.parts), std::ssize(stored.parts) * layers);
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
