// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/adapter.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/convert/weights/fused_parameters.h"
#include "lib/convert/weights/module_pattern.h"
#include "lib/device/convert.h"
#include "lib/device/low_rank.h"
#include "lib/model/config.h"
#include "lib/model/family.h"
#include "lib/model/parts.h"
#include "lib/model/transposed_weights.h"

namespace reshard {
namespace {

constexpr std::string_view kTrainedModule = ".modules_to_save.", kBaseLayer = ".base_layer.";
constexpr std::string_view kTrainedRows = ".token_adapter.trainable_tokens_delta";

// The parsed key of an adapter's tensor.
struct Operand {
  enum class Kind { kA, kB, kWhole, kRows, kUnknown } kind = Kind::kUnknown;
  // The module of a pair or of rows ("model.layers.0.self_attn.q_proj"), otherwise the weight ("lm_head.weight").
  std::string of;
  bool is_embeddings = false;

  bool is_of_pair() const { return kind == Kind::kA || kind == Kind::kB; }
};
struct PairWord {
  Operand::Kind kind;
  std::string_view word, end;  // the key's suffix after the module, and the key's ending
  bool is_embeddings;
};
constexpr PairWord kPairWords[] = {{Operand::Kind::kA, ".lora_A.", ".weight", false},
                                   {Operand::Kind::kB, ".lora_B.", ".weight", false},
                                   {Operand::Kind::kA, ".lora_embedding_A", ".lora_embedding_A", true},
                                   {Operand::Kind::kB, ".lora_embedding_B", ".lora_embedding_B", true}};
Operand operand_of(std::string_view key) {
  if (const std::size_t at = key.find(kPeftPrefix); at != std::string_view::npos)
    key.remove_prefix(at + kPeftPrefix.size());
  for (const PairWord& word : kPairWords) {
    const std::size_t at = key.find(word.word);
    if (at == std::string_view::npos || !key.ends_with(word.end)) continue;
    return {word.kind, std::string(key.substr(0, at)), word.is_embeddings};
  }
  if (key.ends_with(kTrainedRows))
    return {Operand::Kind::kRows, std::string(key.substr(0, key.size() - kTrainedRows.size()))};
  if (is_adapter(key)) return {};
  std::string weight(key);
  if (const std::size_t at = weight.find(kTrainedModule); at != std::string::npos)
    weight.erase(at, weight.find('.', at + kTrainedModule.size()) - at);  // with the adapter's name
  for (std::size_t at; (at = weight.find(kBaseLayer)) != std::string::npos;) weight.erase(at, kBaseLayer.size() - 1);
  return {Operand::Kind::kWhole, weight};
}

struct Pair {
  std::optional<std::size_t> a, b;
  bool is_embeddings = false;
  const FusedParameter* fused = nullptr;  // the parameter it changes, if that is not a module's weight
  bool is_input_first = false;            // the rows of the fused parameter are inputs
};

// Returns the name of a wrapped module in the model: `module` without ".base_layer" at its end.
std::string unwrapped_module(std::string module) {
  constexpr std::string_view kWrapped = ".base_layer";
  while (module.ends_with(kWrapped)) module.resize(module.size() - kWrapped.size());
  return module;
}

class AdapterReader {
 public:
  AdapterReader(Reader& reader, const AdapterOptions& options, const Selection& selection, bool merges)
      : reader_(reader), options_(options), selection_(selection), merges_(merges) {
    const auto& tensors = reader_.catalog().tensors();
    is_beside_weights_ = std::any_of(tensors.begin(), tensors.end(),
                                     [](const Tensor& t) { return t.key().starts_with(kAdapterPrefix); });
  }

  Result<Adapter> read(const SourceView& view, const Translation& names) {
    TRY(find_operands());
    const std::string path = TRY(find_adapter_config());
    if (!path.empty()) {
      text_ = TRY(read_whole_file(path, kMaxConfigBytes));
      config_ = TRY(parse_json(text_, path));
    }
    if (has_modules_without_weight(view.catalog, names.model.family)) {
      family_ = names.model.family;
      fused_ = TRY(fused_parameters(view.catalog, names.model));
      TRY(find_fused());
    }
    TRY(find_ranks());
    TRY(read_config(path));
    Adapter out;
    out.config = text_;
    out.notes = notes_on_zeros();
    if (std::optional<std::string> note = note_on_unnamed_modules()) out.notes.push_back(*std::move(note));
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

  bool is_there() const {
    const auto& tensors = reader_.catalog().tensors();
    return std::any_of(tensors.begin(), tensors.end(),
                       [&](const Tensor& t) { return is_own(t) && operand_of(t.key()).kind != Operand::Kind::kWhole; });
  }

  // Describes the adapter, also one of a kind that cannot be merged. Empty if there is none.
  Result<std::string> describe() const {
    std::set<std::string> modules;
    std::set<Index> ranks;
    bool has_peft_names = false;
    for (const Tensor& t : reader_.catalog().tensors()) {
      has_peft_names = has_peft_names || t.name.starts_with(kPeftPrefix);
      const Operand operand = is_own(t) ? operand_of(t.key()) : Operand();
      if (!operand.is_of_pair()) continue;
      modules.insert(operand.of);
      if (operand.kind == Operand::Kind::kA && t.shape.rank() == 2) ranks.insert(t.shape[0]);
    }
    if (modules.empty() && !has_peft_names) return std::string();
    const std::string path = TRY(find_adapter_config());
    Json config = Json::object();
    if (!path.empty())
      if (auto json = parse_json(TRY(read_whole_file(path, kMaxConfigBytes)), path)) config = std::move(*json);
    const auto text_of = [&](std::string_view member) {
      const Json* const value = config.find(member);
      return value && value->is_string() ? printable(*value->as_string()) : std::string();
    };
    const std::string type = text_of("peft_type"), base = text_of("base_model_name_or_path");
    if (modules.empty() && type.empty()) return std::string();
    std::string out = type.empty() || type == "LORA" ? "LoRA" : "PEFT's " + type;
    // Matrices of several experts have the rows of all of them, so the config counts first.
    const Json* const pattern = config.find("rank_pattern");
    const bool has_pattern = pattern && pattern->is_object() && !pattern->as_object()->empty();
    const auto r = config.get_index("r");
    if (r && !has_pattern)
      out += ", rank " + std::to_string(*r);
    else if (!ranks.empty())
      out += ", rank " + std::to_string(*ranks.begin()) +
             (ranks.size() > 1 ? " to " + std::to_string(*ranks.rbegin()) : "");
    if (const auto alpha = config.get_index("lora_alpha")) out += ", alpha " + std::to_string(*alpha);
    if (!modules.empty()) out += ", " + count_of(std::ssize(modules), "module");
    if (path.empty()) return out + "; no adapter_config.json gives its alpha and base model";
    return out + "; base model: " + (base.empty() ? "not recorded" : base);
  }

 private:
  // Returns whether the tensor belongs to the adapter. All tensors of a separate adapter do.
  bool is_own(const Tensor& t) const {
    const bool is_selected =
        options_.reader ? !any_glob_matches(selection_.exclude, t.name) : selects(selection_, t.name);
    if (!is_selected || state_kind(t.key()) == StateKind::kOptimizer) return false;
    return is_beside_weights_ ? t.key().starts_with(kAdapterPrefix) : options_.reader || is_adapter(t.key());
  }
  const std::string& root() const { return reader_.catalog().root; }

  Error unknown(const Tensor& t, const std::string& why) const {
    return unsupported(
        root() + ": " + tensor_text(t.name) + ": " + why +
        "unsupported part of an adapter; expected lora_A or lora_B of a linear layer or embedding, a whole "
        "weight, or rows of an embedding. Add --exclude to leave it out");
  }

  Error no_weight(const Tensor& t, const std::string& key, const Translation& names) const {
    const std::string what = tensor_text(t.name) + " changes '" + printable(key) + "', which is missing";
    if (names.model.family && !names.renames())
      return usage_error(root() + ": " + what + " under the names of the source, which this output keeps; " +
                         "add --names hf for the names that adapters use");
    return corrupt(root() + ": an adapter of another model: " + what);
  }

  // Returns the entry for a tensor with this key.
  std::optional<std::size_t>& slot_of(const Operand& operand) {
    if (operand.kind == Operand::Kind::kWhole) return whole_[operand.of];
    if (operand.kind == Operand::Kind::kRows) return rows_[operand.of];
    Pair& pair = pairs_[operand.of];
    return operand.kind == Operand::Kind::kA ? pair.a : pair.b;
  }

  Status find_operands() {
    const auto& tensors = reader_.catalog().tensors();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& t = tensors[i];
      if (!is_own(t)) continue;
      const Operand operand = operand_of(t.key());
      const bool is_matrix = operand.kind != Operand::Kind::kWhole;
      if (operand.kind == Operand::Kind::kUnknown || (is_matrix && t.shape.rank() != 2) ||
          !can_convert(t.dtype, DType::kFloat32))
        return unknown(t, "");
      std::optional<std::size_t>& slot = slot_of(operand);
      if (slot)
        return unsupported(root() + ": " + tensor_text(tensors[*slot].name) + " and " + tensor_text(t.name) +
                           ": several adapters of one layer; add --exclude to leave one of them out");
      slot = i;
      if (operand.is_of_pair()) pairs_[operand.of].is_embeddings = operand.is_embeddings;
    }
    for (const auto& [module, pair] : pairs_) {
      if (!pair.a || !pair.b)
        return corrupt(root() + ": " + tensor_text(tensors[pair.a ? *pair.a : *pair.b].name) + ": its lora_" +
                       (pair.is_embeddings ? "embedding_" : "") + (pair.a ? "B" : "A") + " is missing");
      const Tensor &a = tensors[*pair.a], &b = tensors[*pair.b];
      if (a.shape[0] != b.shape[1] || a.shape[0] < 1)
        return corrupt(root() + ": " + tensor_text(a.name) + " " + to_string(a.shape) + " and " + tensor_text(b.name) +
                       " " + to_string(b.shape) + ": expected as many rows of A as columns of B");
    }
    return {};
  }

  // Returns the path of adapter_config.json: next to the checkpoint, or in a directory for the adapter (lora_adapter in
  // verl, adapter in our own outputs, default in PEFT, or the only one that has it); empty if there is none.
  Result<std::string> find_adapter_config() const {
    const std::string file(kAdapterConfigFile);
    for (const std::string& name : {file, "lora_adapter/" + file, "adapter/" + file, "default/" + file})
      if (std::string path = TRY(find_beside(reader_.catalog(), name)); !path.empty()) return path;
    return only_below(reader_.catalog().root, file);
  }

  // Returns the path of a file that exactly one directory in `root` has; empty if none or several have it.
  static Result<std::string> only_below(const std::string& root, const std::string& file) {
    std::string found;
    if (!TRY(is_directory(root))) return found;
    const auto entries = TRY(list_directory(root));
    for (const DirectoryEntry& entry : entries) {
      if (!entry.is_directory) continue;
      std::string path = path_join(path_join(root, entry.name), file);
      if (!TRY(path_exists(path))) continue;
      if (!found.empty()) return std::string();
      found = std::move(path);
    }
    return found;
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
    return std::any_of(pairs_.begin(), pairs_.end(),
                       [&](const auto& pair) { return !find_weight(pair.first + ".weight", weights, family); });
  }

  // Returns whether a pair's matrices fit a fused parameter as it is defined, and whether they fit with its inputs
  // first.
  struct Fit {
    bool as_defined = false, input_first = false;
  };
  Fit fit_of(const Pair& pair, const FusedParameter& parameter) const {
    const auto& tensors = reader_.catalog().tensors();
    const Dims &a = tensors[*pair.a].shape, &b = tensors[*pair.b].shape, &p = parameter.shape;
    if (pair.is_embeddings || parameter.experts() < 1 || a[0] % parameter.experts() != 0) return {};
    return {b[0] == p[1] && a[1] == p[2], a[1] == p[1] && b[0] == p[2]};
  }

  // Returns whether adapter_config.json allows a parameter to be a target. It allows all if it names none.
  bool is_target(const FusedParameter& parameter) const {
    const Json* const list = config_ ? config_->find("target_parameters") : nullptr;
    if (!list || !list->is_array()) return true;
    const auto names = list->as_array();
    if (!names || names->empty()) return true;
    const std::string whole = "." + parameter.module + "." + parameter.name;
    return std::any_of(names->begin(), names->end(), [&](const Json& name) {
      return name.is_string() && whole.ends_with("." + std::string(*name.as_string()));
    });
  }

  // Finds the fused parameter of each pair whose module has no weight. The pairs of a module, innermost first, belong
  // to its parameters in their order. Fails if the shapes allow no assignment, or several.
  Status find_fused() {
    std::map<std::string, std::vector<std::pair<std::string, Pair*>>> by_module;
    for (auto& [module, pair] : pairs_) {
      const std::string name = model_module(unwrapped_module(module));
      if (std::any_of(fused_.begin(), fused_.end(), [&](const FusedParameter& p) { return p.module == name; }))
        by_module[name].emplace_back(module, &pair);
    }
    for (auto& [module, pairs] : by_module) {
      std::sort(pairs.begin(), pairs.end(),
                [](const auto& x, const auto& y) { return x.first.size() > y.first.size(); });
      std::vector<const FusedParameter*> targets;
      for (const FusedParameter& parameter : fused_)
        if (parameter.module == module && is_target(parameter)) targets.push_back(&parameter);
      TRY(assign(module, pairs, targets));
    }
    return {};
  }

  Status assign(const std::string& module, const std::vector<std::pair<std::string, Pair*>>& pairs,
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
    const std::string what = root() + ": the adapter of '" + printable(module) + "' (" +
                             count_of(std::ssize(pairs), "pair") + " of matrices, rank x experts)";
    if (ways.empty()) {
      std::vector<std::string> shapes;
      for (const FusedParameter* p : targets) shapes.push_back("'" + printable(p->name) + "' " + to_string(p->shape));
      return unsupported(what + " fits no parameter of the module: " + join(shapes, ", "));
    }
    if (ways.size() > 1)
      return unsupported(what + " fits several parameters of the module; add target_parameters to adapter_config.json");
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      Pair& pair = *pairs[i].second;
      const Fit fit = fit_of(pair, *ways[0][i]);
      pair.fused = ways[0][i];
      pair.is_input_first = fit.input_first && (pair.fused->input_first || !fit.as_defined);
    }
    return {};
  }

  Status find_ranks() {
    for (const auto& [module, pair] : pairs_) {
      if (!pair.fused && module.ends_with(".base_layer"))
        return unknown(reader_.catalog().tensors()[*pair.a], "'" + printable(module) + "' has no known parameter; ");
      ranks_[rank_of(pair)].push_back(pair.fused ? target_of(*pair.fused) : module);
    }
    return {};
  }

  Index rank_of(const Pair& pair) const {
    return reader_.catalog().tensors()[*pair.a].shape[0] / (pair.fused ? pair.fused->experts() : 1);
  }

  static std::string target_of(const FusedParameter& parameter) { return parameter.module + "." + parameter.name; }

  Status read_config(const std::string& path) {
    if (path.empty()) {
      if (!rows_.empty())
        return usage_error(root() + ": its adapter has rows of '" + printable(rows_.begin()->first) +
                           "', but no adapter_config.json next to it to tell which rows");
      if (!options_.alpha)
        return usage_error(root() + ": its adapter has rank " + std::to_string(ranks_.begin()->first) +
                           ", but no adapter_config.json next to it gives the alpha; add --lora-alpha");
      text_ = made_config();
      alpha_ = *options_.alpha;
      return {};
    }
    return use_config(*config_).context(path);
  }

  // Returns whether the adapter was initialised from the weights, from which its product was subtracted (PiSSA, OLoRA,
  // LoftQ, ...). Such an adapter fits only the changed weights, and PEFT computes them again when it loads one.
  static bool is_taken_from_weights(const Json& json) {
    const Json* const how = json.find("init_lora_weights");
    if (!how || !how->is_string()) return false;
    const auto word = *how->as_string();
    return word != "gaussian" && word != "eva" && word != "orthogonal";
  }

  Status use_config(const Json& json) {
    if (is_taken_from_weights(json)) {
      if (options_.reader && merges_)
        return unsupported(
            "init_lora_weights: the adapter was initialised from the weights and changed them when training "
            "began; convert the training state, or save it with PEFT's "
            "path_initial_model_for_weight_conversion");
      Json plain = json;
      text_ = python_text(plain.set("init_lora_weights", true));
    }
    const Index r = TRY(json.get_index("r"));
    std::set<Index> allowed = {r};
    if (const Json* pattern = json.find("rank_pattern"); pattern && pattern->is_object())
      for (const Json::Member& m : TRY(pattern->as_object())) allowed.insert(TRY(m.value.as_index()));
    for (const auto& [rank, modules] : ranks_)
      if (!allowed.contains(rank))
        return corrupt("r " + std::to_string(r) + ": the matrices of '" + printable(modules.front()) + "' have rank " +
                       std::to_string(rank));
    const Json* const alpha = json.find("lora_alpha");
    if (!alpha) return corrupt("lora_alpha: expected a number, got nothing");
    alpha_ = TRY(alpha_of(*alpha).context("lora_alpha"));
    // verl writes 0 as a placeholder.
    if (options_.alpha && alpha_ == 0) {
      alpha_ = *options_.alpha;
      Json filled = TRY(parse_json(text_, "adapter_config.json"));
      text_ = python_text(filled.set("lora_alpha", Json(alpha_)));
    }
    if (options_.alpha && *options_.alpha != alpha_)
      return usage_error("lora_alpha differs from --lora-alpha; drop the option");
    if (const Json* pattern = json.find("alpha_pattern"); pattern && pattern->is_object())
      for (const Json::Member& m : TRY(pattern->as_object())) {
        const Status read = read_alpha(m);
        if (!read && merges_) return read;
        if (!read) knows_alphas_ = false;
      }
    if (!merges_) return {};
    const Json* const bias = json.find("bias");
    const bool trains_bias = bias && bias->is_string() && *bias->as_string() != "none";
    if (trains_bias && options_.reader && is_beside_weights_)
      return unsupported(
          "bias: it was trained with the adapter and is stored in the weights next to it; convert these "
          "without --adapter");
    for (const std::string_view member : {"use_dora", "lora_bias", "use_qalora", "use_bdlora"})
      if (const Json* flag = json.find(member); flag && flag->is_bool() && TRY(flag->as_bool()))
        return unsupported(std::string(member) + ": merging adapters of this kind is not supported");
    if (const Json* flag = json.find("fan_in_fan_out"); flag && flag->is_bool())
      is_fan_in_fan_out_ = TRY(flag->as_bool());
    if (const Json* rows = json.find("trainable_token_indices"); rows && !rows->is_null()) row_numbers_ = *rows;
    if (const Json* flag = json.find("use_rslora"); flag && flag->is_bool()) rooted_ = TRY(flag->as_bool());
    return {};
  }

  // Reads a member of alpha_pattern.
  Status read_alpha(const Json::Member& m) {
    ModulePattern pattern = TRY(ModulePattern::parse(m.key).context("alpha_pattern"));
    const double alpha = TRY(alpha_of(m.value).context("alpha_pattern: " + printable(m.key)));
    alphas_.emplace_back(std::move(pattern), alpha);
    return {};
  }

  static Result<double> alpha_of(const Json& json) {
    const double alpha = TRY(json.as_double());
    if (!std::isfinite(alpha)) return corrupt("expected a finite number");
    return alpha;
  }

  // Returns the alpha that alpha_pattern gives a module, by the first pattern that matches; nothing if none does.
  std::optional<double> own_alpha(const std::string& module) const {
    const auto own =
        std::find_if(alphas_.begin(), alphas_.end(), [&](const auto& a) { return a.first.matches(module); });
    return own == alphas_.end() ? std::nullopt : std::optional(own->second);
  }

  float scaling_of(const std::string& module, Index rank) const {
    const auto r = static_cast<double>(rank);
    return static_cast<float>(own_alpha(module).value_or(alpha_) / (rooted_ ? std::sqrt(r) : r));
  }

  // Returns a note on the modules whose alpha is 0, for each of the members that may say so.
  std::vector<std::string> notes_on_zeros() const {
    if (!knows_alphas_) return {};
    std::vector<std::string> by_default, by_pattern;
    for (const auto& [module, pair] : pairs_) {
      const std::string name = pair.fused ? target_of(*pair.fused) : module;
      const auto own = own_alpha(name);
      if (own.value_or(alpha_) == 0) (own ? by_pattern : by_default).push_back("'" + printable(name) + "'");
    }
    const auto note = [&](const std::string& member, const std::vector<std::string>& modules) {
      const bool is_all = modules.size() == pairs_.size() && whole_.empty() && rows_.empty();
      return member + " is 0, so the adapter changes nothing" +
             (is_all ? ""
                     : " in " + with_commas(std::ssize(modules)) + " of " + count_of(std::ssize(pairs_), "module") +
                           ": " + some_of(modules, 3));
    };
    std::vector<std::string> out;
    if (!by_default.empty())
      out.push_back(note("lora_alpha", by_default) + "; give the alpha that it was trained with: --lora-alpha");
    if (!by_pattern.empty())
      out.push_back(note("alpha_pattern", by_pattern) + "; correct it in adapter_config.json if they were trained");
    return out;
  }

  // Returns a note on the modules that target_modules does not name although it names others: PEFT ignores their
  // matrices.
  std::optional<std::string> note_on_unnamed_modules() const {
    const Json* const names = config_ ? config_->find("target_modules") : nullptr;
    if (!names || !names->is_array()) return std::nullopt;  // a regular expression, or "all-linear"
    const auto is_named = [&](const std::string& module) {
      return std::ranges::any_of(*names->as_array(), [&](const Json& name) {
        return name.is_string() && ("." + module).ends_with("." + std::string(*name.as_string()));
      });
    };
    std::vector<std::string> unnamed;
    Index modules = 0;
    for (const auto& [module, pair] : pairs_) {
      if (pair.fused) continue;
      ++modules;
      if (!is_named(module)) unnamed.push_back("'" + printable(module) + "'");
    }
    if (unnamed.empty() || std::ssize(unnamed) == modules) return std::nullopt;
    return "target_modules does not name " + with_commas(std::ssize(unnamed)) + " of " + count_of(modules, "module") +
           ": " + some_of(unnamed, 3) + "; PEFT ignores their matrices" + (merges_ ? ", which are merged here" : "") +
           ": add them in adapter_config.json, or leave them out with --exclude";
  }

  // Returns what follows the last number of a name.
  static std::string without_layer(const std::string& name) {
    std::string_view rest = name;
    for (std::size_t dot, begin = 0; (dot = name.find('.', begin)) != std::string::npos; begin = dot + 1)
      if (is_digits(std::string_view(name).substr(begin, dot - begin))) rest = std::string_view(name).substr(dot + 1);
    return std::string(rest);
  }

  // Returns an adapter_config.json with which PEFT loads the adapter.
  std::string made_config() const {
    std::set<std::string> targets;
    const Index most = std::max_element(ranks_.begin(), ranks_.end(), [](const auto& x, const auto& y) {
                         return x.second.size() < y.second.size();
                       })->first;
    Json pattern = Json::object(), list = Json::array();
    for (const auto& [rank, modules] : ranks_)
      for (const std::string& module : modules)
        if (rank != most) pattern.set(module, rank);
    for (const auto& [module, pair] : pairs_)
      if (!pair.fused) targets.insert(module.substr(module.rfind('.') + 1));
    for (const std::string& target : targets) list.push_back(target);
    Json out = Json::object();
    out.set("peft_type", "LORA").set("task_type", "CAUSAL_LM").set("base_model_name_or_path", Json());
    out.set("r", most).set("lora_alpha", Json(*options_.alpha)).set("rank_pattern", std::move(pattern));
    out.set("target_modules", std::move(list)).set("bias", "none").set("inference_mode", true);
    std::set<std::string> parameters;  // without their layer: "mlp.experts.down_proj"
    for (const auto& [module, pair] : pairs_)
      if (pair.fused) parameters.insert(without_layer(target_of(*pair.fused)));
    if (!parameters.empty()) {
      Json fused = Json::array();
      for (const std::string& parameter : parameters) fused.push_back(parameter);
      out.set("target_parameters", std::move(fused));
    }
    std::set<std::string> modules;
    for (const auto& [weight, tensor] : whole_) modules.insert(weight.substr(0, weight.rfind('.')));
    if (!modules.empty()) {
      Json whole = Json::array();
      for (const std::string& module : modules) whole.push_back(module);
      out.set("modules_to_save", std::move(whole));
    }
    return python_text(out);
  }

  Result<std::vector<LowRank>> match_pairs(const SourceView& view, const Translation& names) const {
    const Model& model = names.model;
    const auto& tensors = reader_.catalog().tensors();
    const auto& weights = view.catalog.tensors();
    std::vector<LowRank> out;
    bool has_transposed = false;
    for (const auto& [module, pair] : pairs_) {
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
        return corrupt(root() + ": an adapter of another model: " + tensor_text(b.name) + " " + to_string(b.shape) +
                       " x " + tensor_text(a.name) + " " + to_string(a.shape) + " changes " + tensor_text(w.name) +
                       " " + to_string(w.shape));
      TRY(check_changeable(w));
      LowRank m{*weight, *pair.a, *pair.b, std::nullopt};
      m.rank = a.shape[0];
      m.scaling = scaling_of(module, m.rank);
      m.is_transposed = is_transposed;
      m.is_rounded_to_weight = pair.is_embeddings;
      out.push_back(m);
    }
    if (is_fan_in_fan_out_ && !has_transposed)
      return unsupported(root() + ": fan_in_fan_out: an adapter of this kind cannot be merged, as no weight that it " +
                         "changes is known to be stored [in, out]");
    return out;
  }

  // Returns whether the weight that `a` changes is stored [in, out]. PEFT sets fan_in_fan_out for each module by its
  // class, so the config's value is that of its last module only. Fails (usage) if nothing describes the model and the
  // name leaves it open.
  Result<bool> is_stored_transposed(const Tensor& a, const std::string& key, const Model& model) const {
    if (model.config || model.family) return reshard::is_stored_transposed(model.family, model.config_or_null(), key);
    if (!may_be_stored_transposed(key)) return false;
    return usage_error(root() + ": " + tensor_text(a.name) + " changes '" + printable(key) +
                       "', which GPT-2 and others store [in, out], most models [out, in]; pass --config config.json");
  }

  Status check_changed_once(const std::vector<LowRank>& added, const SourceView& view) const {
    std::set<std::size_t> weights;
    for (const LowRank& m : added)
      if (!weights.insert(m.weight).second)
        return unsupported(root() + ": several matrices of the adapter change " +
                           tensor_text(view.catalog.tensors()[m.weight].name));
    return {};
  }

  // Appends to `out` what the pair of a fused parameter adds to each of its weights.
  Status match_fused(const Pair& pair, const SourceView& view, std::vector<LowRank>& out) const {
    for (const FusedPart& part : pair.fused->parts) {
      TRY(check_changeable(view.catalog.tensors()[part.weight]));
      LowRank m{part.weight, *pair.a, *pair.b, std::nullopt};
      m.rank = rank_of(pair);
      m.scaling = scaling_of(target_of(*pair.fused), m.rank);
      m.is_transposed = pair.is_input_first != part.transposed;
      m.is_rounded_to_weight = pair.fused->experts() > 1;
      m.experts = pair.fused->experts();
      m.expert = part.expert;
      m.first_row = part.first_row;
      out.push_back(m);
    }
    return {};
  }

  Result<std::vector<Replaced>> match_whole(const SourceView& view, const Model& model) const {
    std::vector<Replaced> out;
    for (const auto& [key, tensor] : whole_) {
      const Tensor& t = reader_.catalog().tensors()[*tensor];
      TRY(check_untied(t, key, model));
      const auto weight = find_weight(key, view.catalog, model.family);
      if (!weight) return unknown(t, "the model has no weight '" + printable(key) + "'; ");
      const Tensor& w = view.catalog.tensors()[*weight];
      if (w.shape != t.shape)
        return unsupported(root() + ": " + tensor_text(t.name) + " " + to_string(t.shape) + " would replace " +
                           tensor_text(w.name) + " " + to_string(w.shape) +
                           ": the adapter belongs to another model, or its vocabulary was resized, which "
                           "--merge-adapter does not support");
      TRY(check_changeable(w));
      out.push_back({*weight, *tensor});
    }
    return out;
  }

  // Returns the rows, out of `of`, that the trained rows of a module replace.
  Result<std::vector<Index>> row_numbers(const std::string& module, Index of) const {
    const Json* list = &row_numbers_;
    if (row_numbers_.is_object()) {
      const auto members = TRY(row_numbers_.as_object());
      const auto found =
          std::find_if(members.begin(), members.end(), [&](const Json::Member& m) { return module.ends_with(m.key); });
      if (found == members.end()) return corrupt("expected an entry for '" + printable(module) + "', got none");
      list = &found->value;
    }
    std::set<Index> different;
    std::vector<Index> out;
    for (const Json& item : TRY(list->as_array())) {
      const Index row = TRY(item.as_index());
      if (row < 0 || row >= of || !different.insert(row).second)
        return corrupt("expected distinct rows below " + std::to_string(of) + ", got " + std::to_string(row));
      out.push_back(row);
    }
    return out;
  }

  Result<std::vector<TrainedRows>> match_rows(const SourceView& view, const Translation& names) const {
    const Model& model = names.model;
    std::vector<TrainedRows> out;
    for (const auto& [module, tensor] : rows_) {
      const Tensor& t = reader_.catalog().tensors()[*tensor];
      const auto found = find_weight(module + ".weight", view.catalog, model.family);
      if (!found) return no_weight(t, module + ".weight", names);
      const Tensor& w = view.catalog.tensors()[*found];
      const Index of = w.shape.rank() == 2 ? w.shape[0] : 0;
      const auto rows = TRY(row_numbers(module, of).context(root() + ": trainable_token_indices"));
      if (of == 0 || t.shape != Dims{std::ssize(rows), w.shape[1]})
        return corrupt(root() + ": " + tensor_text(t.name) + " " + to_string(t.shape) + " would replace " +
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

  // Fails if `t` changes only one of two tied weights.
  Status check_untied(const Tensor& t, const std::string& key, const Model& model) const {
    if (!is_tied(key, model)) return {};
    return unsupported(
        root() + ": " + tensor_text(t.name) +
        ": embedding and head of the model are tied, but the adapter trained only one of them, so the merged "
        "model would not match its config.json; add --exclude to leave it out");
  }

  Status check_changeable(const Tensor& w) const {
    if (can_convert(w.dtype, DType::kFloat32) && byte_size(w.dtype) >= 2) return {};
    return unsupported(root() + ": " + tensor_text(w.name) + " is " + std::string(info(w.dtype).torch_name) +
                       ": adapters can be merged only into floating-point weights");
  }

  // Finds a weight by its key. An adapter of a model saved without its head lacks the prefix "model.".
  static std::optional<std::size_t> find_weight(const std::string& key, const Catalog& weights, const Family* family) {
    if (!family) return weights.find(key);
    const auto weight = weights.find(canonical_key(*family, key));
    return weight ? weight : weights.find(canonical_key(*family, base_prefix(*family) + key));
  }

  Reader& reader_;
  const AdapterOptions& options_;
  const Selection& selection_;
  const bool merges_;
  bool is_beside_weights_ = false;
  std::map<std::string, Pair> pairs_;                        // by the module
  std::map<std::string, std::optional<std::size_t>> whole_;  // by the weight
  std::map<std::string, std::optional<std::size_t>> rows_;   // by the module
  std::map<Index, std::vector<std::string>> ranks_;
  std::vector<FusedParameter> fused_;
  const Family* family_ = nullptr;
  std::optional<Json> config_;  // adapter_config.json
  std::string text_;
  double alpha_ = 0;
  std::vector<std::pair<ModulePattern, double>> alphas_;  // of modules that have another
  bool knows_alphas_ = true;  // false if a member of alpha_pattern cannot be read, which matters only to a merge
  bool rooted_ = false;
  bool is_fan_in_fan_out_ = false;
  Json row_numbers_ = Json::array();  // trainable_token_indices
};

}  // namespace

Result<std::optional<Adapter>> read_adapter(Reader& source, const AdapterOptions& options, AdapterUse use,
                                            const Selection& selection, const SourceView& view,
                                            const Translation& names) {
  Reader& reader = options.reader ? *options.reader : source;
  const bool merges = use == AdapterUse::kMerged;
  AdapterReader adapter(reader, options, selection, merges);
  if (use == AdapterUse::kNone) return std::optional<Adapter>();
  const std::string& root = reader.catalog().root;
  if (!adapter.is_there()) {
    if (merges)
      return usage_error(
          root + ": --merge-adapter: no adapter found; " +
          (options.reader ? "name the adapter's own file with --adapter" : "give its directory with --adapter"));
    return std::optional<Adapter>();
  }
  const Convention convention = names.model.convention;
  if (!options.reader && names.model.family && convention != Convention::kHf && convention != Convention::kTransformers)
    return unsupported(root + ": an adapter for a model under " + std::string(info(convention).title) +
                       ", which PEFT does not support; add --exclude '*lora_*' to leave it out");
  return std::optional(TRY(adapter.read(view, names)));
}

Result<std::string> describe_adapter(Reader& reader) { return AdapterReader(reader, {}, {}, false).describe(); }

std::vector<std::size_t> Adapter::operands() const {
  std::vector<std::size_t> out;
  for (const LowRank& m : added) {
    out.insert(out.end(), {m.a, m.b});
    if (m.onto) out.push_back(*m.onto);
  }
  for (const Replaced& r : replaced) out.push_back(r.by);
  for (const TrainedRows& r : trained_rows) out.push_back(r.by);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace reshard
