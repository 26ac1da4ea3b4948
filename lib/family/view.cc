// The canonical view. See view.h.
#include "lib/family/view.h"

#include <algorithm>

#include "lib/base/text.h"

namespace reshard {
namespace {

// ---- rows

// `count` canonical rows from `canonical` on are the stored rows `stored`, `stored` + step, ...
struct RowSegment {
  Index canonical = 0;
  Index stored = 0;
  Index count = 0;
  Index step = 1;
};

// Canonical row n*D + t*(D/2) + j of head n is stored row base + 2j + t (t = 0, 1).
void add_rotary_head(std::vector<RowSegment>& out, Index canonical, Index stored, Index head_dim) {
  out.push_back({canonical, stored, head_dim / 2, 2});
  out.push_back({canonical + head_dim / 2, stored + 1, head_dim / 2, 2});
}

std::vector<RowSegment> rotary_rows(Index heads, Index head_dim) {
  std::vector<RowSegment> out;
  for (Index n = 0; n < heads; ++n) add_rotary_head(out, n * head_dim, n * head_dim, head_dim);
  return out;
}

// Row of wqkv: ((kv * R + s) * D + i) with R = g + 2 blocks a key-value head: g query heads, the key, the value.
struct FusedRows {
  std::vector<RowSegment> query, key, value;
};
FusedRows fused_rows(const ModelConfig& c, bool hf_rows) {
  const Index d = c.head_dim(), group = c.num_attention_heads() / c.num_key_value_heads(), blocks = group + 2;
  FusedRows out;
  const auto add = [&](std::vector<RowSegment>& rows, Index head, Index block, bool rotary) {
    if (rotary)
      add_rotary_head(rows, head * d, block * d, d);
    else
      rows.push_back({head * d, block * d, d, 1});
  };
  for (Index kv = 0; kv < c.num_key_value_heads(); ++kv) {
    for (Index s = 0; s < group; ++s) add(out.query, kv * group + s, kv * blocks + s, hf_rows);
    add(out.key, kv, kv * blocks + group, hf_rows);
    add(out.value, kv, kv * blocks + group + 1, false);
  }
  return out;
}

// The fragments of a tensor whose rows are renumbered. `rows` ascends in its stored rows, within one head.
FragmentList map_rows(const FragmentList& in, const std::vector<RowSegment>& rows, int rank, Index element_bytes) {
  FragmentList out(rank);
  // No segment reaches further than this from its first stored row.
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

Status check_rows(const Tensor& tensor, Index expected, const ModelConfig& config, std::string_view arithmetic) {
  if (tensor.shape.rank() > 0 && tensor.shape[0] == expected) return {};
  return corrupt("tensor '" + printable(tensor.name) + "': " + config.path + " says " + std::to_string(expected) +
                 " rows (" + std::string(arithmetic) + "), got shape " + to_string(tensor.shape));
}

std::string product(std::string_view a, Index x, std::string_view b, Index y) {
  return std::string(a) + " " + std::to_string(x) + " x " + std::string(b) + " " + std::to_string(y);
}

// A tensor of its own over the part of `from` that the rows select.
Tensor with_rows(const Tensor& from, std::string name, Index row_count, const std::vector<RowSegment>& rows,
                 Index row_group) {
  Tensor out;
  out.name = std::move(name);
  out.dtype = from.dtype;
  out.shape = from.shape;
  out.shape[0] = row_count;
  out.fragments = map_rows(from.fragments, rows, from.shape.rank(), byte_size(from.dtype));
  out.replicas = map_rows(from.replicas, rows, from.shape.rank(), byte_size(from.dtype));
  out.path = from.path;
  out.located = from.located;
  out.row_group = row_group;
  return out;
}

Tensor renamed(const Tensor& from, std::string name) {
  Tensor out = from;
  out.name = std::move(name);
  return out;
}

// ---- the view, tensor by tensor

class ViewBuilder {
 public:
  ViewBuilder(const Catalog& from, const ViewOptions& options, std::vector<std::string>* dropped)
      : from_(from), options_(options), dropped_(dropped) {}

  Result<Catalog> build() {
    out_.root = from_.root;
    out_.files = from_.files;
    out_.blobs = from_.blobs;
    out_.attributes = from_.attributes;
    for (const Tensor& tensor : from_.tensors()) TRY(add(tensor));
    if (!unknown_.empty()) return unknown_error();
    add_tied_head();
    out_.sort_by_name();
    return std::move(out_);
  }

 private:
  Status add(const Tensor& tensor) {
    const StateKey key = split_state_key(tensor.name);
    const auto parsed = key.parameter.empty() ? std::nullopt : parse_name(*options_.family, key.parameter);
    if (!parsed) {
      if (key.kind == StateKind::kModel && !options_.keep_unknown) unknown_.push_back(tensor.name);
      return out_.add(tensor);
    }
    const NameRule& rule = *parsed->rule;
    if (rule.rows == Rows::kDropped) {
      if (dropped_) dropped_->push_back(tensor.name);
      return {};
    }
    if (rule.rows == Rows::kFusedQkv) return add_fused(tensor, key, parsed->layer);
    std::string name = key.prefix + format_name(*parsed, Names::kHf) + key.suffix;
    const bool rotary = rule.rows == Rows::kRotaryQuery || rule.rows == Rows::kRotaryKey;
    if (!rotary || !options_.hf_rows || parsed->names == Names::kHf || tensor.shape.rank() == 0)
      return out_.add(renamed(tensor, std::move(name)));

    const ModelConfig* config = TRY(need_config(tensor));
    const bool query = rule.rows == Rows::kRotaryQuery;
    const Index heads = query ? config->num_attention_heads() : config->num_key_value_heads();
    TRY(check_rows(
        tensor, heads * config->head_dim(), *config,
        product(query ? "num_attention_heads" : "num_key_value_heads", heads, "head_dim", config->head_dim())));
    return out_.add(with_rows(tensor, std::move(name), tensor.shape[0], rotary_rows(heads, config->head_dim()),
                              config->head_dim()));
  }

  Status add_fused(const Tensor& tensor, const StateKey& key, Index layer) {
    const auto name = [&](std::string_view projection) {
      return key.prefix + "model.layers." + std::to_string(layer) + ".self_attn." + std::string(projection) +
             "_proj.weight" + key.suffix;
    };
    if (tensor.shape.rank() == 0) {  // an optimizer's step counts for all three
      for (const std::string_view p : {"q", "k", "v"}) TRY(out_.add(renamed(tensor, name(p))));
      return {};
    }
    const ModelConfig* config = TRY(need_config(tensor));
    const Index d = config->head_dim(), heads = config->num_attention_heads(), kv = config->num_key_value_heads();
    TRY(check_rows(tensor, (heads + 2 * kv) * d, *config,
                   "(num_attention_heads " + std::to_string(heads) + " + 2 x num_key_value_heads " +
                       std::to_string(kv) + ") x head_dim " + std::to_string(d)));
    const FusedRows rows = fused_rows(*config, options_.hf_rows);
    TRY(out_.add(with_rows(tensor, name("q"), heads * d, rows.query, d)));
    TRY(out_.add(with_rows(tensor, name("k"), kv * d, rows.key, d)));
    return out_.add(with_rows(tensor, name("v"), kv * d, rows.value, d));
  }

  Result<const ModelConfig*> need_config(const Tensor& tensor) const {
    if (options_.config && options_.config->head_dim() % 2 == 0) return options_.config;
    if (options_.config)
      return corrupt(options_.config->path + ": head_dim " + std::to_string(options_.config->head_dim()) +
                     " is odd; a rotary embedding needs pairs");
    return usage_error("tensor '" + printable(tensor.name) +
                       "': its rows are ordered by attention head, and no config.json says how many heads there are; "
                       "give one with --config");
  }

  // A tied model stores the embedding once: the head is a second tensor over the same bytes.
  void add_tied_head() {
    if (!options_.config || !options_.config->tie_word_embeddings()) return;
    for (const NameRule& rule : options_.family->rules) {
      if (rule.tied_to.empty() || out_.find(rule.hf)) continue;
      if (const auto embedding = out_.find(rule.tied_to))
        (void)out_.add(renamed(out_.tensors()[*embedding], std::string(rule.hf)));
    }
  }

  Error unknown_error() const {
    std::string list;
    for (std::size_t i = 0; i < std::min<std::size_t>(unknown_.size(), 20); ++i)
      list += "\n  " + printable(unknown_[i]);
    if (unknown_.size() > 20) list += "\n  and " + std::to_string(unknown_.size() - 20) + " more";
    return unsupported(from_.root + ": " + std::to_string(unknown_.size()) + " tensors have names that family " +
                       std::string(options_.family->name) +
                       " does not know (--keep-unknown carries them as they are, " +
                       "--exclude leaves them out):" + list);
  }

  const Catalog& from_;
  const ViewOptions& options_;
  std::vector<std::string>* dropped_;
  Catalog out_;
  std::vector<std::string> unknown_;
};

}  // namespace

Result<Catalog> canonical_view(const Catalog& catalog, const ViewOptions& options, std::vector<std::string>* dropped) {
  return ViewBuilder(catalog, options, dropped).build();
}

Status check_against_config(const Catalog& view, const Family& family, const ModelConfig& config, bool complete) {
  std::vector<std::string> missing;
  const auto check_shape = [&](const Parameter& expected) -> Status {
    const Dims& shape = view.tensors()[*view.find(expected.name)].shape;
    if (shape == expected.shape) return {};
    return corrupt("tensor '" + printable(expected.name) + "': " + config.path + " says " + to_string(expected.shape) +
                   ", got " + to_string(shape));
  };
  for (const Parameter& p : TRY(parameters(family, config))) {
    if (view.find(p.name))
      TRY(check_shape(p));
    else if (!p.is_tied)
      missing.push_back(p.name);
  }
  for (const Parameter& p : TRY(prediction_parameters(family, config)))
    if (view.find(p.name)) TRY(check_shape(p));
  for (const Tensor& tensor : view.tensors()) {
    const StateKey key = split_state_key(tensor.name);
    if (key.kind != StateKind::kModel) continue;
    const auto parsed = parse_name(family, key.parameter);
    if (parsed && parsed->layer >= config.num_hidden_layers() + config.num_prediction_layers())
      return corrupt("tensor '" + printable(tensor.name) + "': " + config.path + " says num_hidden_layers " +
                     std::to_string(config.num_hidden_layers()));
  }
  if (missing.empty() || !complete) return {};
  return corrupt(view.root + ": " + std::to_string(missing.size()) + " tensors that " + config.path +
                 " describes are missing, the first is '" + missing.front() + "'");
}

}  // namespace reshard
