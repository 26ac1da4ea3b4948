#include "lib/family/family.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "lib/base/text.h"
#include "lib/layout/stages.h"

namespace reshard {
namespace {

constexpr std::array<const Family*, 1> kFamilies = {&kLlamaFamily};

// ---- names

std::string without_wrappers(std::string_view name) {
  std::string out(name);
  constexpr std::string_view kCompiled = "_orig_mod.";  // torch.compile wraps modules under this name
  for (std::size_t at; (at = out.find(kCompiled)) != std::string::npos;) out.erase(at, kCompiled.size());
  return out;
}

// Matches "layers.{}.x" against "layers.12.x"; -1 for a pattern without "{}".
std::optional<Index> match(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return std::nullopt;
  const std::size_t brace = pattern.find("{}");
  if (brace == std::string_view::npos) return pattern == name ? std::optional<Index>(-1) : std::nullopt;
  const std::string_view head = pattern.substr(0, brace), tail = pattern.substr(brace + 2);
  if (!name.starts_with(head) || !name.ends_with(tail) || name.size() <= head.size() + tail.size()) return std::nullopt;
  const std::string_view digits = name.substr(head.size(), name.size() - head.size() - tail.size());
  Index layer = 0;
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), layer);
  if (parsed.ec != std::errc() || parsed.ptr != digits.data() + digits.size() || layer < 0) return std::nullopt;
  return layer;
}

std::optional<ParsedName> parse_as(const Family& family, std::string_view name, Names names) {
  for (const NameRule& rule : family.rules) {
    const std::string_view pattern = names == Names::kHf           ? rule.hf
                                     : names == Names::kTorchtitan ? rule.torchtitan
                                                                   : rule.torchtitan_2026;
    if (const auto layer = match(pattern, name)) return ParsedName{&rule, names, *layer};
  }
  return std::nullopt;
}

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
  const Index d = c.head_dim, group = c.num_attention_heads / c.num_key_value_heads, blocks = group + 2;
  FusedRows out;
  const auto add = [&](std::vector<RowSegment>& rows, Index head, Index block, bool rotary) {
    if (rotary)
      add_rotary_head(rows, head * d, block * d, d);
    else
      rows.push_back({head * d, block * d, d, 1});
  };
  for (Index kv = 0; kv < c.num_key_value_heads; ++kv) {
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
    std::string name = key.prefix + format_name(rule, Names::kHf, parsed->layer) + key.suffix;
    const bool rotary = rule.rows == Rows::kRotaryQuery || rule.rows == Rows::kRotaryKey;
    if (!rotary || !options_.hf_rows || parsed->names == Names::kHf || tensor.shape.rank() == 0)
      return out_.add(renamed(tensor, std::move(name)));

    const ModelConfig* config = TRY(need_config(tensor));
    const bool query = rule.rows == Rows::kRotaryQuery;
    const Index heads = query ? config->num_attention_heads : config->num_key_value_heads;
    TRY(check_rows(
        tensor, heads * config->head_dim, *config,
        product(query ? "num_attention_heads" : "num_key_value_heads", heads, "head_dim", config->head_dim)));
    return out_.add(
        with_rows(tensor, std::move(name), tensor.shape[0], rotary_rows(heads, config->head_dim), config->head_dim));
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
    const Index d = config->head_dim, heads = config->num_attention_heads, kv = config->num_key_value_heads;
    TRY(check_rows(tensor, (heads + 2 * kv) * d, *config,
                   "(num_attention_heads " + std::to_string(heads) + " + 2 x num_key_value_heads " +
                       std::to_string(kv) + ") x head_dim " + std::to_string(d)));
    const FusedRows rows = fused_rows(*config, options_.hf_rows);
    TRY(out_.add(with_rows(tensor, name("q"), heads * d, rows.query, d)));
    TRY(out_.add(with_rows(tensor, name("k"), kv * d, rows.key, d)));
    return out_.add(with_rows(tensor, name("v"), kv * d, rows.value, d));
  }

  Result<const ModelConfig*> need_config(const Tensor& tensor) const {
    if (options_.config && options_.config->head_dim % 2 == 0) return options_.config;
    if (options_.config)
      return corrupt(options_.config->path + ": head_dim " + std::to_string(options_.config->head_dim) +
                     " is odd; a rotary embedding needs pairs");
    return usage_error("tensor '" + printable(tensor.name) +
                       "': its rows are ordered by attention head, and no config.json says how many heads there are; "
                       "give one with --config");
  }

  // A tied model stores the embedding once: the head is a second tensor over the same bytes.
  void add_tied_head() {
    if (!options_.config || !options_.config->tie_word_embeddings || out_.find("lm_head.weight")) return;
    if (const auto embedding = out_.find("model.embed_tokens.weight"))
      (void)out_.add(renamed(out_.tensors()[*embedding], "lm_head.weight"));
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

Index expected_size(Size size, const ModelConfig& c) {
  switch (size) {
    case Size::kNone:
      return -1;
    case Size::kVocab:
      return c.vocab_size;
    case Size::kHidden:
      return c.hidden_size;
    case Size::kIntermediate:
      return c.intermediate_size;
    case Size::kQuery:
      return c.num_attention_heads * c.head_dim;
    case Size::kKeyValue:
      return c.num_key_value_heads * c.head_dim;
  }
  return -1;
}

std::string replace_first(std::string text, std::string_view from, std::string_view to) {
  if (const std::size_t at = text.find(from); at != std::string::npos) text.replace(at, from.size(), to);
  return text;
}

}  // namespace

std::string_view names_title(Names names) { return names == Names::kHf ? "Hugging Face names" : "torchtitan names"; }

std::span<const Family* const> families() { return kFamilies; }

std::optional<ParsedName> parse_name(const Family& family, std::string_view parameter) {
  const std::string name = without_wrappers(parameter);
  for (const Names names : {Names::kHf, Names::kTorchtitan, Names::kTorchtitan2026})
    if (auto parsed = parse_as(family, name, names)) return parsed;
  if (!name.starts_with("model.")) return std::nullopt;
  for (const Names names : {Names::kTorchtitan, Names::kTorchtitan2026})
    if (auto parsed = parse_as(family, std::string_view(name).substr(6), names)) return parsed;
  return std::nullopt;
}

std::string format_name(const NameRule& rule, Names names, Index layer) {
  const std::string_view pattern = names == Names::kHf           ? rule.hf
                                   : names == Names::kTorchtitan ? rule.torchtitan
                                                                 : rule.torchtitan_2026;
  return replace_first(std::string(pattern), "{}", std::to_string(layer));
}

std::optional<Detected> detect_family(const Catalog& catalog) {
  std::optional<Detected> best;
  Index most = 0;
  for (const Family* family : kFamilies) {
    std::array<Index, 3> counts{};
    for (const Tensor& tensor : catalog.tensors()) {
      const StateKey key = split_state_key(tensor.name);
      if (key.kind != StateKind::kModel) continue;
      if (const auto parsed = parse_name(*family, key.parameter)) ++counts[static_cast<std::size_t>(parsed->names)];
    }
    // Torchtitan's two generations share most names; those only one of them has decide between the two.
    const Index sum = counts[0] + counts[1] + counts[2];
    if (sum <= most) continue;
    most = sum;
    Names names = Names::kTorchtitan;
    if (counts[0] > counts[1] + counts[2])
      names = Names::kHf;
    else if (counts[2] > 0)
      names = Names::kTorchtitan2026;
    best = Detected{family, names};
  }
  return best;
}

Result<Catalog> canonical_view(const Catalog& catalog, const ViewOptions& options, std::vector<std::string>* dropped) {
  return ViewBuilder(catalog, options, dropped).build();
}

std::string rename_key(const Family& family, std::string_view key, Names names) {
  const StateKey parts = split_state_key(key);
  if (parts.parameter.empty()) return std::string(key);
  const auto parsed = parse_name(family, parts.parameter);
  if (!parsed || parsed->rule->rows == Rows::kFusedQkv || parsed->rule->rows == Rows::kDropped) return std::string(key);
  return parts.prefix + format_name(*parsed->rule, names, parsed->layer) + parts.suffix;
}

std::string canonical_key(const Family& family, std::string_view key) { return rename_key(family, key, Names::kHf); }

KeyPath rename_path(const KeyPath& path, std::string_view from, std::string_view to) {
  if (from == to) return path;
  const StateKey before = split_state_key(from), after = split_state_key(to);
  KeyPath out = path;
  for (auto& part : out)
    if (auto* text = std::get_if<std::string>(&part)) *text = replace_first(*text, before.parameter, after.parameter);
  // ("model", "tok_embeddings.weight") for "model.tok_embeddings.weight": the name was spread over the path.
  std::string joined;
  for (const auto& part : out) {
    if (!joined.empty()) joined += '.';
    joined +=
        std::holds_alternative<std::string>(part) ? std::get<std::string>(part) : std::to_string(std::get<Index>(part));
  }
  if (joined != to) return {std::string(to)};
  return out;
}

std::vector<std::pair<std::string, Dims>> parameters(const Family& family, const ModelConfig& config) {
  std::vector<std::pair<std::string, Dims>> out;
  for (const NameRule& rule : family.rules) {
    if (rule.hf.empty() || rule.rows == Rows::kDropped) continue;
    Dims shape;
    for (const Size size : rule.shape)
      if (size != Size::kNone) shape.push_back(expected_size(size, config));
    const Index layers = rule.place == NameRule::Place::kLayer ? config.num_hidden_layers : 1;
    for (Index layer = 0; layer < layers; ++layer) out.emplace_back(format_name(rule, Names::kHf, layer), shape);
  }
  return out;
}

Status check_against_config(const Catalog& view, const Family& family, const ModelConfig& config, bool complete) {
  std::vector<std::string> missing;
  for (const auto& [name, expected] : parameters(family, config)) {
    const auto found = view.find(name);
    if (!found) {
      missing.push_back(name);
      continue;
    }
    const Dims& shape = view.tensors()[*found].shape;
    if (shape != expected)
      return corrupt("tensor '" + printable(name) + "': " + config.path + " says " + to_string(expected) + ", got " +
                     to_string(shape));
  }
  for (const Tensor& tensor : view.tensors()) {
    const StateKey key = split_state_key(tensor.name);
    if (key.kind != StateKind::kModel) continue;
    const auto parsed = parse_name(family, key.parameter);
    if (parsed && parsed->layer >= config.num_hidden_layers)
      return corrupt("tensor '" + printable(tensor.name) + "': " + config.path + " says num_hidden_layers " +
                     std::to_string(config.num_hidden_layers));
  }
  if (missing.empty() || !complete) return {};
  return corrupt(view.root + ": " + std::to_string(missing.size()) + " tensors that " + config.path +
                 " describes are missing, the first is '" + missing.front() + "'");
}

// ---- placement

namespace {

// What a user should know before cutting attention heads apart; empty where none is.
std::string heads_warning(const Mesh& mesh, const ModelConfig& config) {
  const Index tp = mesh.size("tp");
  if (config.num_key_value_heads % tp == 0) return {};
  Index best = tp;
  while (config.num_key_value_heads % best != 0) --best;
  return "tp=" + std::to_string(tp) + " does not divide num_key_value_heads " +
         std::to_string(config.num_key_value_heads) + " of " + config.path +
         ": the checkpoint loads into any mesh, but the model does not run at that degree (tp=" + std::to_string(best) +
         " would)";
}

}  // namespace

Result<Placer> Placer::make(const Mesh& mesh, const Family* family, const ModelConfig* config, const Catalog& source) {
  if (mesh.size("ep") > 1)
    return usage_error("mesh " + mesh.to_string() + ": no family's rules say what ep cuts; only a layout file can");
  Placer placer(mesh, family);
  if (family && config) placer.warning_ = heads_warning(mesh, *config);
  for (const Tensor& tensor : source.tensors()) {
    const StateKey key = split_state_key(tensor.name);
    if (key.kind != StateKind::kModel) continue;
    placer.parameter_shapes_.emplace(key.parameter, tensor.shape);
    placer.layers_ = std::max(placer.layers_, layer_number(key.parameter) + 1);
  }
  TRY(check_stages(StageRule::kTorchtitan, placer.layers_, mesh.size("pp")));
  return placer;
}

Placement Placer::place(const Tensor& tensor) const {
  const StateKey key = split_state_key(tensor.name);
  Placement placement;
  if (key.parameter.empty()) return placement;
  placement.stage = stage(key.parameter);
  if (key.kind == StateKind::kOptimizer) {
    const auto shape = parameter_shapes_.find(key.parameter);
    if (shape == parameter_shapes_.end() || shape->second != tensor.shape) return placement;
  }
  if (tensor.shape.rank() == 0) return placement;
  if (const int dim = tp_dim(tensor, key.parameter); dim >= 0) placement.splits.push_back({{"tp"}, dim});
  placement.splits.push_back({{"dp_shard", "cp"}, 0});
  return placement;
}

int Placer::tp_dim(const Tensor& tensor, std::string_view parameter) const {
  if (family_) {
    if (const auto parsed = parse_name(*family_, parameter)) return parsed->rule->tp_dim;
    return -1;
  }
  if (tensor.shape.rank() < 2) return -1;
  for (std::size_t i = 0; i < tensor.fragments.size(); ++i) {
    const Box box = tensor.fragments.box(i);
    for (int d = 1; d < box.rank(); ++d)
      if (!box.empty() && box.shape[d] < tensor.shape[d]) return d;
  }
  return 0;
}

Index Placer::stage(std::string_view parameter) const {
  const Index stages = mesh_.size("pp");
  if (stages <= 1) return -1;
  Index layer = layer_number(parameter);
  bool first = layer < 0 && parameter.find("embed") != std::string_view::npos;
  if (const auto parsed = family_ ? parse_name(*family_, parameter) : std::nullopt)
    first = parsed->rule->place == NameRule::Place::kFirst;
  if (layer >= 0) return stage_of_layer(StageRule::kTorchtitan, layer, layers_, stages);
  return first ? 0 : stages - 1;
}

}  // namespace reshard
