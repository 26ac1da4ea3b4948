// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/adapter_config.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "lib/base/file.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/model/config.h"
#include "lib/model/parts.h"

namespace reshard {
namespace {

constexpr std::string_view kHeaderKey = "lora_adapter_metadata";

// Returns whether `list`, of a config, has a name that is `name` or its end after a dot.
bool names_end_of(const Json* list, const std::string& name) {
  return list && list->is_array() && std::ranges::any_of(*list->as_array(), [&](const Json& item) {
           return item.is_string() && ("." + name).ends_with("." + std::string(*item.as_string()));
         });
}

// Returns the path of a file that exactly one directory in `root` has; empty if none or several have it.
Result<std::string> only_below(const std::string& root, const std::string& file) {
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

Result<std::string> find_path(const Catalog& catalog) {
  const std::string file(kAdapterConfigFile);
  for (const std::string& name : {file, "lora_adapter/" + file, "adapter/" + file, "default/" + file})
    if (std::string path = TRY(find_beside(catalog, name)); !path.empty()) return path;
  return only_below(catalog.root, file);
}

// Returns the members of a config under a prefix: "unet.r" of "unet.".
Json members_under(const Json& json, std::string_view prefix) {
  Json out = Json::object();
  for (const Json::Member& m : *json.as_object())
    if (m.key.starts_with(prefix)) out.set(m.key.substr(prefix.size()), m.value);
  return out;
}

// Returns the config that diffusers stores in a header: of a model's adapter as it is, of a pipeline's for each model
// with its name in front, as in the names of the tensors (src/diffusers/loaders/lora_base.py, _pack_dict_with_prefix).
// Null if the adapter belongs to several models of a pipeline.
Json config_in_header(const Json& json, const Catalog& catalog) {
  if (!json.is_object() || json.find("r") || catalog.tensors().empty()) return json;
  const std::string& first = catalog.tensors().front().name;
  const std::string prefix = first.substr(0, first.find('.') + 1);
  const bool is_one_models = std::ranges::all_of(
      catalog.tensors(), [&](const Tensor& t) { return std::string_view(t.name).starts_with(prefix); });
  return is_one_models && !prefix.empty() ? members_under(json, prefix) : Json();
}

// Returns whether the adapter was initialised from the weights, from which its product was subtracted (PiSSA, OLoRA,
// LoftQ, ...). Such an adapter fits only the changed weights, and PEFT computes them again when it loads one.
bool is_taken_from_weights(const Json& json) {
  const Json* const how = json.find("init_lora_weights");
  if (!how || !how->is_string()) return false;
  const auto word = *how->as_string();
  return word != "gaussian" && word != "eva" && word != "orthogonal" && word != "mica";
}

// Returns whether a member of the config is given: not null, false or an empty list.
bool is_set(const Json& value) {
  if (value.is_bool()) return *value.as_bool();
  if (value.is_array()) return !value.as_array()->empty();
  return !value.is_null();
}

Result<double> alpha_of(const Json& json) {
  const double alpha = TRY(json.as_double());
  if (!std::isfinite(alpha)) return corrupt("expected a finite number");
  return alpha;
}

// Returns what follows the last number of a name.
std::string without_layer(const std::string& name) {
  std::string_view rest = name;
  for (std::size_t dot, begin = 0; (dot = name.find('.', begin)) != std::string::npos; begin = dot + 1)
    if (is_digits(std::string_view(name).substr(begin, dot - begin))) rest = std::string_view(name).substr(dot + 1);
  return std::string(rest);
}

// Returns an adapter_config.json with which PEFT loads the adapter.
std::string made_config(const AdapterOperands& operands, const AdapterRanks& ranks, double alpha) {
  std::set<std::string> targets;
  const Index most = std::max_element(ranks.begin(), ranks.end(), [](const auto& x, const auto& y) {
                       return x.second.size() < y.second.size();
                     })->first;
  Json pattern = Json::object(), list = Json::array();
  for (const auto& [rank, modules] : ranks)
    for (const std::string& module : modules)
      if (rank != most) pattern.set(module, rank);
  for (const auto& [module, pair] : operands.pairs)
    if (!pair.fused) targets.insert(module.substr(module.rfind('.') + 1));
  for (const std::string& target : targets) list.push_back(target);
  Json out = Json::object();
  out.set("peft_type", "LORA").set("task_type", "CAUSAL_LM").set("base_model_name_or_path", Json());
  out.set("r", most).set("lora_alpha", Json(alpha)).set("rank_pattern", std::move(pattern));
  out.set("target_modules", std::move(list)).set("bias", "none").set("inference_mode", true);
  std::set<std::string> parameters;  // without their layer: "mlp.experts.down_proj"
  for (const auto& [module, pair] : operands.pairs)
    if (pair.fused) parameters.insert(without_layer(pair.changes(module)));
  if (!parameters.empty()) {
    Json fused = Json::array();
    for (const std::string& parameter : parameters) fused.push_back(parameter);
    out.set("target_parameters", std::move(fused));
  }
  std::set<std::string> modules;
  for (const auto& [weight, tensor] : operands.whole) modules.insert(weight.substr(0, weight.rfind('.')));
  if (!modules.empty()) {
    Json whole = Json::array();
    for (const std::string& module : modules) whole.push_back(module);
    out.set("modules_to_save", std::move(whole));
  }
  return python_text(out);
}

}  // namespace

Result<AdapterConfig> AdapterConfig::find(const Catalog& catalog) {
  AdapterConfig out;
  out.path_ = TRY(find_path(catalog));
  if (out.path_.empty()) {
    TRY(out.read_header(catalog));
    if (!out.is_there()) TRY(out.read_trainers_alpha(catalog));
    return out;
  }
  out.text_ = TRY(read_whole_file(out.path_, kMaxConfigBytes));
  out.json_ = TRY(parse_json(out.text_, out.path_));
  return out;
}

Status AdapterConfig::read_header(const Catalog& catalog) {
  const auto entry = std::ranges::find(catalog.header_metadata, kHeaderKey, [](const auto& e) { return e.first; });
  if (entry == catalog.header_metadata.end()) return {};
  const std::string where = catalog.where() + ": __metadata__: " + std::string(kHeaderKey);
  Json json = config_in_header(TRY(parse_json(entry->second, where)), catalog);
  if (!json.find("r")) return {};
  path_ = where;
  text_ = python_text(json);
  json_ = std::move(json);
  return {};
}

// verl: {"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM"} (utils/checkpoint/fsdp_checkpoint_manager.py).
Status AdapterConfig::read_trainers_alpha(const Catalog& catalog) {
  trainers_path_ = TRY(find_beside(catalog, "lora_train_meta.json"));
  if (trainers_path_.empty()) return {};
  const Json json = TRY(parse_json(TRY(read_whole_file(trainers_path_, kMaxConfigBytes)), trainers_path_));
  const Json* const alpha = json.find("lora_alpha");
  if (alpha) trainers_alpha_ = TRY(alpha_of(*alpha).context(trainers_path_ + ": lora_alpha"));
  return {};
}

bool AdapterConfig::allows_parameter(const std::string& parameter) const {
  const Json* const list = json_ ? json_->find("target_parameters") : nullptr;
  if (!list || !list->is_array() || list->as_array()->empty()) return true;
  return is_target_parameter(parameter);
}

bool AdapterConfig::is_target_parameter(const std::string& parameter) const {
  return json_ && names_end_of(json_->find("target_parameters"), parameter);
}

Status AdapterConfig::read(const std::string& where, const AdapterOperands& operands, const AdapterRanks& ranks,
                           const Use& use) {
  if (is_there()) return use_json(*json_, ranks, use).context(path_);
  if (!operands.rows.empty())
    return usage_error(where + ": its adapter has rows of '" + printable(operands.rows.begin()->first) +
                       "', but no adapter_config.json next to it to tell which rows");
  const auto alpha = use.alpha ? use.alpha : trainers_alpha_;
  if (trainers_alpha_ && *alpha != *trainers_alpha_)
    return usage_error(trainers_path_ + ": lora_alpha differs from --lora-alpha; drop the option");
  if (!alpha)
    return usage_error(where + ": its adapter has rank " + std::to_string(ranks.begin()->first) +
                       ", but no adapter_config.json next to it gives the alpha; add --lora-alpha");
  text_ = made_config(operands, ranks, *alpha);
  alpha_ = *alpha;
  return {};
}

Status AdapterConfig::check_mergeable() const {
  if (!json_) return {};
  constexpr const char* kNot =
      ": merging adapters of this kind is not supported; merge it with PEFT's merge_and_unload";
  if (const Json* type = json_->find("peft_type"); type && type->is_string() && *type->as_string() != "LORA")
    return unsupported(path_ + ": peft_type " + printable(*type->as_string()) + kNot);
  // What PEFT does not merge as W + scale B A, or not at all (tuners/lora/variants.py), and copies of layers.
  for (const std::string_view member : {"use_dora", "lora_bias", "use_qalora", "use_bdlora", "kasa_config",
                                        "arrow_config", "alora_invocation_tokens", "layer_replication"})
    if (const Json* value = json_->find(member); value && is_set(*value))
      return unsupported(path_ + ": " + std::string(member) + kNot);
  return {};
}

Status AdapterConfig::use_json(const Json& json, const AdapterRanks& ranks, const Use& use) {
  if (is_taken_from_weights(json)) {
    if (use.is_separate && use.merges)
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
  for (const auto& [rank, modules] : ranks)
    if (!allowed.contains(rank))
      return corrupt("r " + std::to_string(r) + ": the matrices of '" + printable(modules.front()) + "' have rank " +
                     std::to_string(rank));
  const Json* const alpha = json.find("lora_alpha");
  if (!alpha) return corrupt("lora_alpha: expected a number, got nothing");
  alpha_ = TRY(alpha_of(*alpha).context("lora_alpha"));
  // verl writes 0 as a placeholder.
  if (use.alpha && alpha_ == 0) {
    alpha_ = *use.alpha;
    Json filled = TRY(parse_json(text_, "adapter_config.json"));
    text_ = python_text(filled.set("lora_alpha", Json(alpha_)));
  }
  if (use.alpha && *use.alpha != alpha_) return usage_error("lora_alpha differs from --lora-alpha; drop the option");
  if (const Json* pattern = json.find("alpha_pattern"); pattern && pattern->is_object())
    for (const Json::Member& m : TRY(pattern->as_object())) {
      const Status read = read_alpha(m);
      if (!read && use.merges) return read;
      if (!read) knows_alphas_ = false;
    }
  if (!use.merges) return {};
  const Json* const bias = json.find("bias");
  const bool trains_bias = bias && bias->is_string() && *bias->as_string() != "none";
  if (trains_bias && use.is_separate && use.is_beside_weights)
    return unsupported(
        "bias: it was trained with the adapter and is stored in the weights next to it; convert these "
        "without --adapter");
  if (const Json* flag = json.find("fan_in_fan_out"); flag && flag->is_bool())
    is_fan_in_fan_out_ = TRY(flag->as_bool());
  if (const Json* rows = json.find("trainable_token_indices"); rows && !rows->is_null()) row_numbers_ = *rows;
  if (const Json* flag = json.find("use_rslora"); flag && flag->is_bool()) is_rooted_ = TRY(flag->as_bool());
  return {};
}

// Reads a member of alpha_pattern.
Status AdapterConfig::read_alpha(const Json::Member& m) {
  ModulePattern pattern = TRY(ModulePattern::parse(m.key).context("alpha_pattern"));
  const double alpha = TRY(alpha_of(m.value).context("alpha_pattern: " + printable(m.key)));
  alphas_.emplace_back(std::move(pattern), alpha);
  return {};
}

// Returns the alpha that alpha_pattern gives a module, by the first pattern that matches; nothing if none does.
std::optional<double> AdapterConfig::own_alpha(const std::string& changed) const {
  const auto own =
      std::find_if(alphas_.begin(), alphas_.end(), [&](const auto& a) { return a.first.matches(changed); });
  return own == alphas_.end() ? std::nullopt : std::optional(own->second);
}

float AdapterConfig::scaling_of(const std::string& changed, Index rank) const {
  const auto r = static_cast<double>(rank);
  return static_cast<float>(own_alpha(changed).value_or(alpha_) / (is_rooted_ ? std::sqrt(r) : r));
}

Result<std::vector<Index>> AdapterConfig::row_numbers(const std::string& module, Index of) const {
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

std::vector<std::string> AdapterConfig::notes(const AdapterOperands& operands, bool merges) const {
  std::vector<std::string> out = notes_on_zeros(operands);
  if (std::optional<std::string> note = note_on_unnamed_modules(operands, merges)) out.push_back(*std::move(note));
  return out;
}

// Returns a note on the modules whose alpha is 0, for each of the members that may say so.
std::vector<std::string> AdapterConfig::notes_on_zeros(const AdapterOperands& operands) const {
  if (!knows_alphas_) return {};
  std::vector<std::string> by_default, by_pattern;
  for (const auto& [module, pair] : operands.pairs) {
    const std::string name = pair.changes(module);
    const auto own = own_alpha(name);
    if (own.value_or(alpha_) == 0) (own ? by_pattern : by_default).push_back("'" + printable(name) + "'");
  }
  const auto note = [&](const std::string& member, const std::vector<std::string>& modules) {
    const bool is_all = modules.size() == operands.pairs.size() && operands.whole.empty() && operands.rows.empty();
    return member + " is 0, so the adapter changes nothing" +
           (is_all ? ""
                   : " in " + with_commas(std::ssize(modules)) + " of " +
                         count_of(std::ssize(operands.pairs), "module") + ": " + some_of(modules, 3));
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
std::optional<std::string> AdapterConfig::note_on_unnamed_modules(const AdapterOperands& operands, bool merges) const {
  const Json* const names = json_ ? json_->find("target_modules") : nullptr;
  if (!names || !names->is_array()) return std::nullopt;  // a regular expression, or "all-linear"
  const auto is_named = [&](const std::string& module) {
    return names_end_of(names, module) || is_target_parameter(module + ".weight");
  };
  std::vector<std::string> unnamed;
  Index modules = 0;
  for (const auto& [module, pair] : operands.pairs) {
    if (pair.fused) continue;
    ++modules;
    if (!is_named(module)) unnamed.push_back("'" + printable(module) + "'");
  }
  if (unnamed.empty() || std::ssize(unnamed) == modules) return std::nullopt;
  return "target_modules does not name " + with_commas(std::ssize(unnamed)) + " of " + count_of(modules, "module") +
         ": " + some_of(unnamed, 3) + "; PEFT ignores their matrices" + (merges ? ", which are merged here" : "") +
         ": add them in adapter_config.json, or leave them out with --exclude";
}

}  // namespace reshard
