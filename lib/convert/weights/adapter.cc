// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/adapter.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "lib/base/text.h"
#include "lib/convert/weights/adapter_config.h"
#include "lib/convert/weights/adapter_operands.h"
#include "lib/convert/weights/fused_parameters.h"
#include "lib/device/convert.h"
#include "lib/device/low_rank.h"
#include "lib/model/config.h"
#include "lib/model/family.h"
#include "lib/model/parts.h"
#include "lib/model/transposed_weights.h"

namespace reshard {
namespace {

// Returns the name of a wrapped module in the model: `module` without ".base_layer" at its end.
std::string unwrapped_module(std::string module) {
  constexpr std::string_view kWrapped = ".base_layer";
  while (module.ends_with(kWrapped)) module.resize(module.size() - kWrapped.size());
  return module;
}

// Matches an adapter's tensors with the weights that they change.
class AdapterReader {
 public:
  AdapterReader(const Catalog& catalog, const AdapterTensors& own, const AdapterOptions& options, bool merges)
      : catalog_(catalog), own_(own), options_(options), merges_(merges) {}

  Result<Adapter> read(const SourceView& view, const Translation& names) {
    config_ = TRY(AdapterConfig::find(catalog_));
    if (merges_) TRY(config_.check_mergeable());
    operands_ = TRY(own_.operands());
    if (has_modules_without_weight(view.catalog, names.model.family)) {
      family_ = names.model.family;
      fused_ = TRY(fused_parameters(view.catalog, names.model));
      TRY(find_fused());
    }
    TRY(config_.read(where(), operands_, TRY(ranks()),
                     {options_.alpha, options_.reader != nullptr, own_.is_beside_weights(), merges_}));
    Adapter out;
    out.config = config_.text();
    out.notes = config_.notes(operands_, merges_);
    if (!merges_) return out;
    out.added = TRY(match_pairs(view, names));
    TRY(check_changed_once(out.added, view));
    out.replaced = TRY(match_whole(view, names.model));
    out.trained_rows = TRY(match_rows(view, names));
    // PEFT stores the weight of an embedding next to its pair: the pair is added to that weight.
    for (LowRank& m : out.added)
      std::erase_if(out.replaced, [&](const Replaced& r) {
        if (r.weight == m.weight) m.onto = r.by;
        return r.weight == m.weight;
      });
    return out;
  }

 private:
  std::string where() const { return catalog_.where(); }

  Error no_weight(const Tensor& t, const std::string& key, const Translation& names) const {
    const std::string what = tensor_text(t.name) + " changes '" + printable(key) + "', which is missing";
    if (names.model.family && !names.renames())
      return usage_error(where() + ": " + what + " under the names of the source, which this output keeps; " +
                         "add --names hf for the names that adapters use");
    return corrupt(where() + ": an adapter of another model: " + what);
  }

  // Returns the module under the names of the weights. A model saved without its head lacks the prefix "model.", which
  // is added.
  std::string model_module(const std::string& module) const {
    const auto is_known = [&](const std::string& name) {
      return std::any_of(fused_.begin(), fused_.end(), [&](const FusedParameter& p) { return p.module == name; });
    };
    const std::string whole = family_ ? base_prefix(*family_) + module : module;
    return !is_known(module) && is_known(whole) ? whole : module;
  }

  bool has_modules_without_weight(const Catalog& weights, const Family* family) const {
    return std::any_of(operands_.pairs.begin(), operands_.pairs.end(),
                       [&](const auto& pair) { return !find_weight(pair.first + ".weight", weights, family); });
  }

  // Returns whether a pair's matrices fit a fused parameter as it is defined, and whether they fit with its inputs
  // first.
  struct Fit {
    bool as_defined = false, input_first = false;
  };
  Fit fit_of(const AdapterPair& pair, const FusedParameter& parameter) const {
    const auto& tensors = catalog_.tensors();
    const Dims &a = tensors[*pair.a].shape, &b = tensors[*pair.b].shape, &p = parameter.shape;
    if (pair.is_embeddings || parameter.experts() < 1 || a[0] % parameter.experts() != 0) return {};
    return {b[0] == p[1] && a[1] == p[2], a[1] == p[1] && b[0] == p[2]};
  }

  // Finds the fused parameter of each pair whose module has no weight. The pairs of a module, innermost first, belong
  // to its parameters in their order. Fails if the shapes allow no assignment, or several.
  Status find_fused() {
    std::map<std::string, std::vector<std::pair<std::string, AdapterPair*>>> by_module;
    for (auto& [module, pair] : operands_.pairs) {
      const std::string name = model_module(unwrapped_module(module));
      if (std::any_of(fused_.begin(), fused_.end(), [&](const FusedParameter& p) { return p.module == name; }))
        by_module[name].emplace_back(module, &pair);
    }
    for (auto& [module, pairs] : by_module) {
      std::sort(pairs.begin(), pairs.end(),
                [](const auto& x, const auto& y) { return x.first.size() > y.first.size(); });
      std::vector<const FusedParameter*> targets;
      for (const FusedParameter& parameter : fused_)
        if (parameter.module == module && config_.allows_parameter(parameter.full_name()))
          targets.push_back(&parameter);
      TRY(assign(module, pairs, targets));
    }
    return {};
  }

  Status assign(const std::string& module, const std::vector<std::pair<std::string, AdapterPair*>>& pairs,
                const std::vector<const FusedParameter*>& targets) {
    std::vector<std::vector<const FusedParameter*>> ways;
    std::vector<const FusedParameter*> way;
    const std::function<void(std::size_t)> extend = [&](std::size_t from) {
      if (way.size() == pairs.size()) return ways.push_back(way);
      for (std::size_t t = from; t < targets.size(); ++t) {
        const Fit fit = fit_of(*pairs[way.size()].second, *targets[t]);
        if (!fit.as_defined && !fit.input_first) continue;
        way.push_back(targets[t]);
        extend(t + 1);
        way.pop_back();
      }
    };
    extend(0);
    const std::string what = where() + ": the adapter of '" + printable(module) + "' (" +
                             count_of(std::ssize(pairs), "pair") + " of matrices, rank x experts)";
    if (ways.empty()) {
      std::vector<std::string> shapes;
      for (const FusedParameter* p : targets) shapes.push_back("'" + printable(p->name) + "' " + to_string(p->shape));
      return unsupported(what + " fits no parameter of the module: " + join(shapes, ", "));
    }
    if (ways.size() > 1)
      return unsupported(what + " fits several parameters of the module; add target_parameters to adapter_config.json");
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      AdapterPair& pair = *pairs[i].second;
      const Fit fit = fit_of(pair, *ways[0][i]);
      pair.fused = ways[0][i];
      pair.is_input_first = fit.input_first && (pair.fused->input_first || !fit.as_defined);
    }
    return {};
  }

  Result<AdapterRanks> ranks() const {
    AdapterRanks out;
    for (const auto& [module, pair] : operands_.pairs) {
      if (!pair.fused && module.ends_with(".base_layer"))
        return own_.unknown(catalog_.tensors()[*pair.a], "'" + printable(module) + "' has no known parameter; ");
      out[rank_of(pair)].push_back(pair.changes(module));
    }
    return out;
  }

  Index rank_of(const AdapterPair& pair) const {
    return catalog_.tensors()[*pair.a].shape[0] / (pair.fused ? pair.fused->experts() : 1);
  }

  Result<std::vector<LowRank>> match_pairs(const SourceView& view, const Translation& names) const {
    const Model& model = names.model;
    const auto& tensors = catalog_.tensors();
    const auto& weights = view.catalog.tensors();
    std::vector<LowRank> out;
    bool has_transposed = false;
    for (const auto& [module, pair] : operands_.pairs) {
      if (pair.fused) {
        TRY(match_fused(pair, view, out));
        continue;
      }
      const std::string key = module + ".weight";
      const auto weight = find_weight(key, view.catalog, model.family);
      const Tensor &a = tensors[*pair.a], &b = tensors[*pair.b];
      if (!weight) return no_weight(a, key, names);
      TRY(check_untied(a, key, model));
      const Tensor& w = weights[*weight];
      const bool is_transposed = pair.is_embeddings || TRY(is_stored_transposed(a, key, model));
      has_transposed = has_transposed || (is_transposed && !pair.is_embeddings);
      const Dims shape = is_transposed ? Dims{a.shape[1], b.shape[0]} : Dims{b.shape[0], a.shape[1]};
      if (w.shape != shape)
        return corrupt(where() + ": an adapter of another model: " + tensor_text(b.name) + " " + to_string(b.shape) +
                       " x " + tensor_text(a.name) + " " + to_string(a.shape) + " changes " + tensor_text(w.name) +
                       " " + to_string(w.shape));
      TRY(check_changeable(w));
      LowRank m{*weight, *pair.a, *pair.b, std::nullopt};
      m.rank = a.shape[0];
      m.scaling = config_.scaling_of(module, m.rank);
      m.is_transposed = is_transposed;
      m.is_rounded_to_weight = pair.is_embeddings || config_.is_target_parameter(key);
      out.push_back(m);
    }
    if (config_.is_fan_in_fan_out() && !has_transposed)
      return unsupported(where() + ": fan_in_fan_out: an adapter of this kind cannot be merged, as no weight that it " +
                         "changes is known to be stored [in, out]");
    return out;
  }

  // Returns whether the weight that `a` changes is stored [in, out]. PEFT sets fan_in_fan_out for each module by its
  // class, so the config's value is that of its last module only. Fails (usage) if nothing describes the model and the
  // name leaves it open.
  Result<bool> is_stored_transposed(const Tensor& a, const std::string& key, const Model& model) const {
    if (model.config || model.family) return reshard::is_stored_transposed(model.family, model.config_or_null(), key);
    if (!may_be_stored_transposed(key)) return false;
    return usage_error(where() + ": " + tensor_text(a.name) + " changes '" + printable(key) +
                       "', which GPT-2 and others store [in, out], most models [out, in]; pass --config config.json");
  }

  Status check_changed_once(const std::vector<LowRank>& added, const SourceView& view) const {
    std::set<std::size_t> weights;
    for (const LowRank& m : added)
      if (!weights.insert(m.weight).second)
        return unsupported(where() + ": several matrices of the adapter change " +
                           tensor_text(view.catalog.tensors()[m.weight].name));
    return {};
  }

  // Appends to `out` what the pair of a fused parameter adds to each of its weights.
  Status match_fused(const AdapterPair& pair, const SourceView& view, std::vector<LowRank>& out) const {
    for (const FusedPart& part : pair.fused->parts) {
      TRY(check_changeable(view.catalog.tensors()[part.weight]));
      LowRank m{part.weight, *pair.a, *pair.b, std::nullopt};
      m.rank = rank_of(pair);
      m.scaling = config_.scaling_of(pair.fused->full_name(), m.rank);
      m.is_transposed = pair.is_input_first != part.transposed;
      m.is_rounded_to_weight = true;
      m.experts = pair.fused->experts();
      m.expert = part.expert;
      m.first_row = part.first_row;
      out.push_back(m);
    }
    return {};
  }

  Result<std::vector<Replaced>> match_whole(const SourceView& view, const Model& model) const {
    std::vector<Replaced> out;
    for (const auto& [key, tensor] : operands_.whole) {
      const Tensor& t = catalog_.tensors()[*tensor];
      const auto tied = find_tied(key, t, model);
      if (!tied) TRY(check_untied(t, key, model));
      const auto weight = find_weight(key, view.catalog, model.family);
      if (!weight && tied && find_weight(tied->first, view.catalog, model.family)) continue;
      if (!weight) return own_.unknown(t, "the model has no weight '" + printable(key) + "'; ");
      const Tensor& w = view.catalog.tensors()[*weight];
      if (w.shape != t.shape)
        return unsupported(where() + ": " + tensor_text(t.name) + " " + to_string(t.shape) + " would replace " +
                           tensor_text(w.name) + " " + to_string(w.shape) +
                           ": the adapter belongs to another model, or its vocabulary was resized, which "
                           "--merge-adapter does not support");
      TRY(check_changeable(w));
      out.push_back({*weight, *tensor, tied ? std::optional(tied->second) : std::nullopt});
    }
    return out;
  }

  Result<std::vector<TrainedRows>> match_rows(const SourceView& view, const Translation& names) const {
    const Model& model = names.model;
    std::vector<TrainedRows> out;
    for (const auto& [module, tensor] : operands_.rows) {
      const Tensor& t = catalog_.tensors()[*tensor];
      const auto found = find_weight(module + ".weight", view.catalog, model.family);
      if (!found) return no_weight(t, module + ".weight", names);
      const Tensor& w = view.catalog.tensors()[*found];
      const Index of = w.shape.rank() == 2 ? w.shape[0] : 0;
      const auto rows = TRY(config_.row_numbers(module, of).context(where() + ": trainable_token_indices"));
      if (of == 0 || t.shape != Dims{std::ssize(rows), w.shape[1]})
        return corrupt(where() + ": " + tensor_text(t.name) + " " + to_string(t.shape) + " would replace " +
                       count_of(std::ssize(rows), "row") + " of " + tensor_text(w.name) + " " + to_string(w.shape));
      TRY(check_changeable(w));
      // Rows of an embedding also replace those of a head tied to it.
      for (std::size_t i = 0; i < view.catalog.tensors().size(); ++i)
        if (i == *found || (is_tied(module + ".weight", model) && is_tied(view.catalog.tensors()[i].name, model) &&
                            view.catalog.tensors()[i].shape == w.shape))
          out.push_back({i, *tensor, rows});
    }
    return out;
  }

  // Returns whether a weight is the embedding or the head of a model that ties them.
  static bool is_tied(const std::string& key, const Model& model) {
    const auto name = model.family ? parse_name(*model.family, key) : std::nullopt;
    return name && name->rule->is_vocabulary() && model.config && model.config->tie_word_embeddings();
  }

  // Returns the weight that is tied to that of `key`, which `t` replaces, and the tensor that replaces it, if there is
  // one.
  std::optional<std::pair<std::string, std::size_t>> find_tied(const std::string& key, const Tensor& t,
                                                               const Model& model) const {
    if (!is_tied(key, model)) return std::nullopt;
    for (const auto& [other, tensor] : operands_.whole)
      if (other != key && is_tied(other, model) && catalog_.tensors()[*tensor].shape == t.shape)
        return std::pair(other, *tensor);
    return std::nullopt;
  }

  // Fails if `t` changes one of two tied weights, also if the adapter changes the other too: it may do so differently.
  Status check_untied(const Tensor& t, const std::string& key, const Model& model) const {
    if (!is_tied(key, model)) return {};
    const auto changed = std::count_if(operands_.whole.begin(), operands_.whole.end(),
                                       [&](const auto& each) { return is_tied(each.first, model); }) +
                         std::count_if(operands_.pairs.begin(), operands_.pairs.end(),
                                       [&](const auto& each) { return is_tied(each.first + ".weight", model); });
    return unsupported(where() + ": " + tensor_text(t.name) + ": embedding and head of the model are tied, but the " +
                       (changed > 1 ? "adapter changes each of them by itself" : "adapter changes only one of them") +
                       ", so the merged model would not match its config.json; add --exclude to leave it out");
  }

  Status check_changeable(const Tensor& w) const {
    if (can_convert(w.dtype, DType::kFloat32) && byte_size(w.dtype) >= 2) return {};
    return unsupported(where() + ": " + tensor_text(w.name) + " is " + std::string(info(w.dtype).torch_name) +
                       ": adapters can be merged only into floating-point weights");
  }

  // Finds a weight by its key. An adapter of a model saved without its head lacks the prefix "model.".
  static std::optional<std::size_t> find_weight(const std::string& key, const Catalog& weights, const Family* family) {
    if (!family) return weights.find(key);
    const auto weight = weights.find(canonical_key(*family, key));
    return weight ? weight : weights.find(canonical_key(*family, base_prefix(*family) + key));
  }

  const Catalog& catalog_;
  const AdapterTensors& own_;
  const AdapterOptions& options_;
  const bool merges_;
  AdapterOperands operands_;
  AdapterConfig config_;
  std::vector<FusedParameter> fused_;
  const Family* family_ = nullptr;
};

}  // namespace

Result<std::optional<Adapter>> read_adapter(Reader& source, const AdapterOptions& options, AdapterUse use,
                                            const Selection& selection, const SourceView& view,
                                            const Translation& names) {
  Reader& reader = options.reader ? *options.reader : source;
  const bool merges = use == AdapterUse::kMerged;
  if (use == AdapterUse::kNone) return std::optional<Adapter>();
  const Catalog& catalog = reader.catalog();
  const AdapterTensors own(catalog, options.reader != nullptr, selection);
  if (!own.is_there()) {
    if (merges && options.reader) TRY(TRY(AdapterConfig::find(catalog)).check_mergeable());
    if (merges)
      return usage_error(
          catalog.where() + ": --merge-adapter: no adapter found; " +
          (options.reader ? "name the adapter's own file with --adapter" : "give its directory with --adapter"));
    return std::optional<Adapter>();
  }
  const Convention convention = names.model.convention;
  if (!options.reader && names.model.family && convention != Convention::kHf && convention != Convention::kTransformers)
    return unsupported(catalog.where() + ": an adapter for a model under " + std::string(info(convention).title) +
                       ", which PEFT does not support; add --exclude '*lora_*' to leave it out");
  return std::optional(TRY(AdapterReader(catalog, own, options, merges).read(view, names)));
}

Result<std::string> describe_adapter(Reader& reader) {
  const Catalog& catalog = reader.catalog();
  const Selection everything;
  const AdapterTensors own(catalog, false, everything);
  std::set<std::string> modules;
  std::set<Index> ranks;
  bool has_peft_names = false;
  for (const Tensor& t : catalog.tensors()) {
    has_peft_names = has_peft_names || t.name.starts_with(kPeftPrefix);
    const AdapterOperand operand = own.is_own(t) ? adapter_operand(t.key()) : AdapterOperand();
    if (!operand.is_of_pair()) continue;
    modules.insert(operand.of);
    if (operand.kind == AdapterOperand::Kind::kA && t.shape.rank() == 2) ranks.insert(t.shape[0]);
  }
  if (modules.empty() && !has_peft_names && !catalog.find(kPromptEmbeddings)) return std::string();
  const auto found = AdapterConfig::find(catalog);
  if (!found && found.error().code() != ErrorCode::kCorrupt) return found.error();
  const Json config = found && found->json() ? *found->json() : Json::object();
  const auto text_of = [&](std::string_view member) {
    const Json* const value = config.find(member);
    return value && value->is_string() ? printable(*value->as_string()) : std::string();
  };
  const std::string type = text_of("peft_type"), base = text_of("base_model_name_or_path");
  if (modules.empty() && type.empty()) return std::string();
  const auto is_set = [&](std::string_view flag) {
    const auto value = config.get_bool(flag);
    return value.has_value() && *value;
  };
  std::string out = !type.empty() && type != "LORA" ? "PEFT's " + type : is_set("use_dora") ? "DoRA" : "LoRA";
  // Matrices of several experts have the rows of all of them, so the config counts first.
  const Json* const pattern = config.find("rank_pattern");
  const bool has_pattern = pattern && pattern->is_object() && !pattern->as_object()->empty();
  const auto r = config.get_index(type == "ADALORA" ? "target_r" : "r");
  if (r && !has_pattern)
    out += ", rank " + std::to_string(*r);
  else if (!ranks.empty())
    out +=
        ", rank " + std::to_string(*ranks.begin()) + (ranks.size() > 1 ? " to " + std::to_string(*ranks.rbegin()) : "");
  const Json* const alphas = config.find("alpha_pattern");
  if (const auto alpha = config.get_index("lora_alpha")) out += ", alpha " + std::to_string(*alpha);
  if (alphas && alphas->is_object() && !alphas->as_object()->empty()) out += " (others in alpha_pattern)";
  if (is_set("use_rslora")) out += ", rsLoRA";
  if (const auto tokens = config.get_index("num_virtual_tokens")) out += ", " + count_of(*tokens, "virtual token");
  if (!modules.empty()) out += ", " + count_of(std::ssize(modules), "module");
  if (found && found->trainers_alpha())
    return out + ", alpha " + to_text(Json(*found->trainers_alpha())) + "; base model: not recorded";
  if (found && !found->is_there()) return out + "; no adapter_config.json gives its alpha and base model";
  return out + "; base model: " + (base.empty() ? "not recorded" : base);
}

std::vector<std::size_t> Adapter::operands() const {
  std::vector<std::size_t> out;
  for (const LowRank& m : added) {
    out.insert(out.end(), {m.a, m.b});
    if (m.onto) out.push_back(*m.onto);
  }
  for (const Replaced& r : replaced) {
    out.push_back(r.by);
    if (r.equal) out.push_back(*r.equal);
  }
  for (const TrainedRows& r : trained_rows) out.push_back(r.by);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace reshard
