// The canonical view. See view.h.
#include "lib/model/view.h"

#include <algorithm>

#include "lib/base/text.h"
#include "lib/model/packing.h"

namespace reshard {
namespace {

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
    if (parsed->rule->rows == Rows::kDropped) {
      if (dropped_) dropped_->push_back(tensor.name);
      return {};
    }
    if (parsed->is_packed()) return add_parts(tensor, key, *parsed);
    std::string name = key.prefix + canonical_name(*parsed) + key.suffix;
    const NameRule& rule = *parsed->rule;
    const bool rotary = rule.rows == Rows::kRotaryQuery || rule.rows == Rows::kRotaryKey;
    if (!rotary || !options_.hf_rows || !has_rotary_pairs(parsed->convention) || tensor.shape.rank() == 0)
      return out_.add(renamed(tensor, std::move(name)));
    return out_.add(TRY(with_halves(tensor, std::move(name), *TRY(need_pairs(tensor)), rule.rows)));
  }

  Status add_parts(const Tensor& tensor, const StateKey& key, const ParsedName& parsed) {
    const bool paired =
        parsed.rule->rows == Rows::kRotaryQuery && has_rotary_pairs(parsed.convention) && options_.hf_rows;
    if (tensor.shape.rank() == 0) {  // an optimizer's step counts for all parts; written it is the first one's
      std::vector<std::string> names = part_names(parsed, TRY(experts_of(tensor, key)));
      if (options_.is_target) names.resize(1);
      for (const std::string& name : names) TRY(out_.add(renamed(tensor, key.prefix + name + key.suffix)));
      return {};
    }
    if (paired) TRY(need_pairs(tensor));
    for (const PackedPart& part : TRY(parts_of(parsed, tensor.shape, options_.config, paired, what(tensor))))
      TRY(out_.add(unpack(tensor, part, key.prefix + part.name + key.suffix)));
    return {};
  }

  // How many experts the parameter of an optimizer's number has.
  Result<Index> experts_of(const Tensor& tensor, const StateKey& key) const {
    const auto parameter = from_.find(key.parameter);
    if (parameter && from_.tensors()[*parameter].shape.rank() > 0) return from_.tensors()[*parameter].shape[0];
    if (const Index n = options_.config ? options_.config->number("num_experts") : 0; n > 0) return n;
    return usage_error(what(tensor) +
                       ": counts for the experts of a tensor that is not there, and no config.json says " +
                       "how many they are; give one with --config");
  }

  static std::string what(const Tensor& tensor) { return "tensor '" + printable(tensor.name) + "'"; }

  // The tensor with the rows of each head in halves.
  static Result<Tensor> with_halves(const Tensor& tensor, std::string name, const ModelConfig& config, Rows rows) {
    const bool query = rows == Rows::kRotaryQuery;
    const Index heads = query ? config.num_attention_heads() : config.num_key_value_heads(), d = config.head_dim();
    if (tensor.shape[0] != heads * d)
      return corrupt(what(tensor) + ": " + config.path + " says " + std::to_string(heads * d) + " rows (" +
                     (query ? "num_attention_heads " : "num_key_value_heads ") + std::to_string(heads) +
                     " x head_dim " + std::to_string(d) + "), got shape " + to_string(tensor.shape));
    return unpack(tensor, {{}, tensor.shape, -1, rotary_rows(heads, d), false, d}, std::move(name));
  }

  Result<const ModelConfig*> need_pairs(const Tensor& tensor) const {
    const ModelConfig* config = TRY(need_head_counts(options_.config, what(tensor)));
    if (config->head_dim() % 2 == 0) return config;
    return corrupt(config->path + ": head_dim " + std::to_string(config->head_dim()) +
                   " is odd; a rotary embedding needs pairs");
  }

  // A tied model stores the embedding once: the head is a second tensor over the same bytes.
  void add_tied_head() {
    if (options_.is_target || !options_.config || !options_.config->tie_word_embeddings()) return;
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
