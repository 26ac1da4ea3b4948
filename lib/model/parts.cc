// SPDX-License-Identifier: Apache-2.0
// Implements parts.h.
#include "lib/model/parts.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "lib/base/choices.h"
#include "lib/base/shell.h"
#include "lib/base/text.h"
#include "lib/checkpoint/average_words.h"
#include "lib/model/family.h"
#include "lib/model/family_file.h"

namespace reshard {
namespace {

constexpr std::size_t kMaxWrapperParts = 5;  // "state.app.model.module.net."
constexpr std::size_t kMaxPatterns = 2048;   // limit of patterns matched against the families; a model has dozens
constexpr std::size_t kMaxModels = 8;        // in one catalog
constexpr Index kFewNames = 3;               // a family may match this many by chance

// Removes the names of modules that wrap others: torch.compile, activation checkpointing, FSDP1, DeepSpeed,
// torch.optim's averaged models.
std::string without_inner_wrappers(std::string_view name) {
  static constexpr std::array<std::string_view, 4> kWrappers = {"_orig_mod.", "_checkpoint_wrapped_module.",
                                                                "_fsdp_wrapped_module.", "_forward_module."};
  std::string out(name);
  for (const std::string_view wrapper : kWrappers)
    for (std::size_t at; (at = out.find(wrapper)) != std::string::npos;) out.erase(at, wrapper.size());
  return out;
}

// Names of dictionaries that people put around a whole state.
bool is_outer_word(std::string_view word) {
  static constexpr std::array<std::string_view, 7> kWords = {"app",         "state", "state_dict", "checkpoint",
                                                             "checkpoints", "train", "trainer"};
  return std::find(kWords.begin(), kWords.end(), word) != kWords.end();
}

// Names that trainers give the module that contains the model.
bool is_module_word(std::string_view word) {
  static constexpr std::array<std::string_view, 4> kWords = {"model", "module", "net", "network"};
  return std::find(kWords.begin(), kWords.end(), word) != kWords.end();
}

// A name whose first components determine its kind: "app.optim.state.x" is "optim" after "app.".
struct ClassifiedName {
  StateKind kind = StateKind::kModel;
  std::string_view prefix;  // up to and including the word
  std::string plain;        // start of the plain key, "optimizer."
  std::string_view rest;    // after the dot that follows the word
  bool is_average = false;
  bool is_named = false;  // an optimizer in a dict of optimizers
};

// Begins the evidence for a wrapper that an option chooses.
constexpr std::string_view kGivenWith = "given with ";

// Begins the evidence for a model that is the average of another.
constexpr std::string_view kAverageOf = "the average of ";

// The counter of torch.optim.swa_utils.AveragedModel, next to the "module." that it averages.
constexpr std::string_view kAverageCount = "n_averaged";

// Words for models that are averages of others in self-distillation (DINO, I-JEPA, MoCo), and not elsewhere.
bool is_doubtful_word(std::string_view word) {
  static constexpr std::array<std::string_view, 5> kWords = {"teacher", "target", "momentum", "encoder_k",
                                                             "key_encoder"};
  return hints_at_average(word) || std::any_of(kWords.begin(), kWords.end(), [&](std::string_view said) {
           return word.find(said) != std::string_view::npos;
         });
}

// Megatron-FSDP's key for groups whose options are stored by parameter.
constexpr std::string_view kGroupsByParameter = "param_to_group_meta.";

bool is_of_optimizer(std::string_view rest) {
  return rest.starts_with("state.") || rest.starts_with("param_groups.") || rest.starts_with(kGroupsByParameter);
}

// `rest` follows the word in `name`. In a list of optimizers (Lightning's "optimizer_states.0.state.") the position
// becomes the number; in a dict (Composer's "state.optimizers.DecoupledAdamW.state.") optimizers have names.
ClassifiedName classify_optimizer_name(std::string_view name, std::string_view word, std::string_view rest) {
  std::string_view number = optimizer_number(word);
  bool is_named = false;
  const std::size_t dot = rest.find('.');
  if (dot != std::string_view::npos && !is_of_optimizer(rest) && is_of_optimizer(rest.substr(dot + 1))) {
    is_named = !is_digits(rest.substr(0, dot));
    if (!is_named) number = rest.substr(0, dot);
    rest.remove_prefix(dot + 1);
  }
  return {StateKind::kOptimizer,
          name.substr(0, name.size() - rest.size()),
          "optimizer" + (number.empty() ? "" : "_" + std::string(number)),
          rest,
          false,
          is_named};
}

ClassifiedName classify(std::string_view name) {
  std::size_t begin = 0;
  bool only_outer = true;
  for (int depth = 0; depth < 3; ++depth) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view word = name.substr(begin, end - begin);
    const std::string_view rest = end == name.size() ? std::string_view() : name.substr(end + 1);
    if (is_digits(word)) break;
    if ((is_optimizer_word(word) && only_outer) ||
        ((is_optimizer_word(word) || word == "opt") && is_of_optimizer(rest)))
      return classify_optimizer_name(name, word, rest);
    if (is_average_word(word) && only_outer && end < name.size())
      return {StateKind::kOther, name.substr(0, end + 1), {}, rest, true};
    if (is_training_word(word) && only_outer) return {StateKind::kOther, name.substr(0, end), {}, rest};
    only_outer = only_outer && is_outer_word(word);
    if (end == name.size()) break;
    begin = end + 1;
  }
  return {};
}

// Returns the plain key of an optimizer's value, with the parameter's wrappers still in it.
std::string optimizer_key(const ClassifiedName& found) {
  std::string_view rest = found.rest;
  const bool is_by_parameter = take(rest, kGroupsByParameter);
  return rest.empty() ? found.plain : found.plain + (is_by_parameter ? ".param_groups." : ".") + std::string(rest);
}

// ---- Which prefix wraps a set of names

// Returns "" and the prefixes of more than half of the names, component by component: "app.", "app.model.".
std::vector<std::string> common_prefixes(const NamePatterns& names) {
  std::vector<std::string> out = {""};
  const Index all = count_all(names);
  while (out.size() <= kMaxWrapperParts) {
    std::map<std::string_view, Index> next;
    for (const auto& [pattern, alike] : names) {
      const std::string_view name = pattern;
      if (!name.starts_with(out.back())) continue;
      const std::size_t dot = name.find('.', out.back().size());
      if (dot != std::string_view::npos) next[name.substr(0, dot + 1)] += alike.count;
    }
    const auto most =
        std::max_element(next.begin(), next.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    if (most == next.end() || most->second * 2 <= all || most->first.find('{') != std::string_view::npos) break;
    out.emplace_back(most->first);
  }
  return out;
}

// Returns best_known() for the names that have the prefix, without it. If only a minority is known, the match is
// chance.
FamilyMatch known_without(const NamePatterns& names, std::string_view prefix, Families families) {
  NamePatterns without;
  bool have_prefix = names.size() <= kMaxPatterns;
  for (const auto& [pattern, alike] : names) {
    if (without.size() == kMaxPatterns) break;
    have_prefix = have_prefix && pattern.starts_with(prefix);
    if (!pattern.starts_with(prefix) || pattern.size() == prefix.size()) continue;
    without.emplace(pattern.substr(prefix.size()), AlikeNames{alike.example.substr(prefix.size()), alike.count});
  }
  FamilyMatch best = best_known(without, families);
  // Models are more similar in their in-memory names than in those in files, so more must be known: Mamba without its
  // head shares three quarters with Nemotron-H.
  if (best.family && !best.family->in_memory.empty() && best.names * 5 <= count_all(without) * 4) return {};
  best.is_all = best.is_all && have_prefix;
  return best.names > count_all(without) / 2 ? best : FamilyMatch{};
}

struct Wrapper {
  std::string prefix = {};  // prefix around the names
  std::string base = {};    // prefix to add instead, for a model saved without its head (base_prefix())
  std::string evidence = {};
  Index known = 0;  // number of known names under the prefix
};

// Returns the common prefix without which the most names are known.
template <class WrapperOf>
Wrapper best_wrapper(const NamePatterns& names, const WrapperOf& wrapper_of) {
  Wrapper out;
  const Index all = count_all(names);
  for (const std::string& prefix : common_prefixes(names)) {
    if (out.known == all) break;
    Wrapper wrapper = wrapper_of(prefix);
    if (wrapper.known > out.known) out = std::move(wrapper);
  }
  return out;
}

// Returns a family that has all these names except for its base_prefix(); its in-memory names, if it has others there.
const Family* family_without_base(const NamePatterns& names, std::string_view prefix, Families families) {
  if (count_all(names) < kFewNames) return nullptr;
  NamePatterns without;
  for (const auto& [pattern, alike] : names)
    if (!pattern.starts_with(prefix))
      return nullptr;
    else
      without.emplace(pattern.substr(prefix.size()), alike);
  const Family* found = nullptr;
  each_family(families, first_words(without), [&](const Family& family) {
    const std::string base = base_prefix(family);
    Index parameters = 0;
    const auto is_known = [&](const auto& name) {
      const std::string_view example = name.second.example;
      const std::string whole = base + std::string(example.substr(prefix.size()));
      const auto parsed = parse_name(family, whole);
      const bool is_parameter = parsed && (family.in_memory.empty() || parsed->stored);
      parameters += is_parameter;
      return is_parameter || family.carries(whole);
    };
    if (!base.empty() && std::all_of(names.begin(), names.end(), is_known) && parameters > 0) found = &family;
    return found == nullptr;
  });
  return found;
}

Wrapper wrapper_by_family(const NamePatterns& names, Families families) {
  const Index all = count_all(names);
  return best_wrapper(names, [&](const std::string& prefix) -> Wrapper {
    constexpr const char* kEvidence = "the names under it are those of family ";
    const FamilyMatch known = known_without(names, prefix, families);
    const Family* const base = known.names * 2 > all ? nullptr : family_without_base(names, prefix, families);
    if (base)
      return {prefix, base_prefix(*base), kEvidence + base->name + " without '" + base_prefix(*base) + "'", all};
    return {prefix, "", prefix.empty() || !known.family ? "" : kEvidence + known.family->name, known.names};
  });
}

// Finds a wrapper from the usual names of dictionaries and modules around a model, if all names begin with it:
// "app.model.", "module.". "model." is also transformers' module next to the head, so it only counts as a wrapper if a
// head ("lm_head.weight") is inside it, or a training state ("app.") around it.
Wrapper wrapper_by_words(const NamePatterns& names) {
  if (names.empty()) return {};
  std::string_view common = names.begin()->first;
  for (const auto& [pattern, alike] : names) {
    const auto differ = std::mismatch(common.begin(), common.end(), pattern.begin(), pattern.end()).first;
    common = common.substr(0, differ - common.begin());
  }
  std::size_t end = 0;
  std::string_view last, before;
  for (std::size_t dot; (dot = common.find('.', end)) != std::string_view::npos; end = dot + 1) {
    const std::string_view word = common.substr(end, dot - end);
    if (!is_outer_word(word) && !is_module_word(word)) break;
    before = last;
    last = word;
  }
  if (last == "model" && !(is_outer_word(before) && before != "state_dict")) {
    const auto under = [&](const auto& name) { return std::string_view(name.first).substr(end); };
    const auto is_head = [&](const auto& name) { return std::ranges::count(under(name), '.') == 1; };
    const auto is_numbered = [&](const auto& name) { return under(name).find(".{}") < under(name).find('.') + 1; };
    if (std::none_of(names.begin(), names.end(), is_head) || std::any_of(names.begin(), names.end(), is_numbered))
      end -= last.size() + 1;
  }
  return {std::string(common.substr(0, end)), "", "every name of the model begins with it"};
}

using PatternSet = std::set<std::string, std::less<>>;

// Finds a wrapper without which the names, with one of the bases in front, are among `others`.
Wrapper wrapper_by_match(const NamePatterns& names, const PatternSet& others,
                         const std::vector<std::string>& bases = {""}) {
  return best_wrapper(names, [&](const std::string& prefix) {
    Wrapper best;
    for (const std::string& base : bases) {
      Index known = 0;
      for (const auto& [pattern, alike] : names)
        if (pattern.starts_with(prefix) && others.contains(base + pattern.substr(prefix.size()))) known += alike.count;
      if (known > best.known)
        best = {prefix, base, prefix.empty() ? "" : "the optimizer has the names under it", known};
    }
    return best;
  });
}

// Returns the evidence that the names under `prefix`, which all names have, are a model, or nothing.
std::optional<std::string> model_under(const NamePatterns& names, const std::string& prefix, Families families) {
  for (const std::string& inner : common_prefixes(names)) {
    if (inner.size() < prefix.size()) continue;
    if (const FamilyMatch known = known_without(names, inner, families); known.names >= kFewNames)
      return "the names under it are those of family " + known.family->name;
  }
  return std::nullopt;
}

std::string unwrapped(std::string name, const Wrapper& wrapper) {
  return name.starts_with(wrapper.prefix) ? name.replace(0, wrapper.prefix.size(), wrapper.base) : name;
}

// ---- All names of a catalog

class PartFinder {
 public:
  PartFinder(Catalog& catalog, const KeyChanges& changes, bool is_model, Families families)
      : catalog_(catalog),
        renames_(changes.renames),
        is_model_(is_model),
        as_stored_(changes.as_stored && changes.model_prefix.empty()),
        families_(families),
        given_(changes.model_prefix),
        wanted_(changes.part) {
    if (!given_.empty() && !given_.ends_with('.')) given_ += '.';
  }

  Status find() {
    for (Part& part : catalog_.parts) part.is_told = true;
    is_optimizer_ = is_bare_optimizer(catalog_);
    find_adapters();
    for (const Tensor& t : catalog_.tensors()) count(renamed(t.key()));
    number_optimizers();
    find_averages();
    if (given_.empty()) find_models();
    name_averages();
    TRY(choose());
    TRY(find_wrappers());
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
      Tensor& t = catalog_.tensor(i);
      t.is_key_told = !t.plain_key.empty();
      t.plain_key = differing(plain_key(renamed(t.key())), t.name);
    }
    for (Blob& b : catalog_.blobs) {
      b.is_key_told = !b.plain_key.empty();
      b.plain_key = differing(plain_key(renamed(b.key())), b.name);
    }
    std::sort(catalog_.parts.begin(), catalog_.parts.end(),
              [](const Part& a, const Part& b) { return std::tie(a.kind, a.prefix) < std::tie(b.kind, b.prefix); });
    return {};
  }

 private:
  static std::string differing(std::string key, const std::string& name) { return key == name ? "" : std::move(key); }

  std::string renamed(std::string name) const {
    for (const auto& [from, to] : renames_)
      for (std::size_t at = 0; (at = name.find(from, at)) != std::string::npos;) {
        const std::size_t end = at + from.size();
        const bool is_whole = (at == 0 || name[at - 1] == '.') && (end == name.size() || name[end] == '.');
        if (is_whole) name.replace(at, from.size(), to);
        at += is_whole ? to.size() : 1;
      }
    return name;
  }

  bool is_given_model(std::string_view name) const { return !given_.empty() && name.starts_with(given_); }

  ClassifiedName classified(std::string_view name) const {
    if (is_given_model(name) || (!chosen_.empty() && name.starts_with(chosen_))) return {};
    return is_optimizer_ ? ClassifiedName{StateKind::kOptimizer, {}, "optimizer", name} : classify(name);
  }

  void count(const std::string& name) {
    const ClassifiedName found = classified(name);
    if (found.kind == StateKind::kModel && !is_beside_weights(name)) add_name(model_, without_wrappers(name));
    if (found.kind == StateKind::kModel && ("." + name).ends_with("." + std::string(kAverageCount)))
      counted_.insert(name.substr(0, name.size() - kAverageCount.size()));
    if (found.is_average) add_name(averages_[std::string(found.prefix)], without_inner_wrappers(name));
    if (found.kind != StateKind::kOptimizer) return;
    if (found.is_named) named_optimizers_.emplace(found.prefix);
    add_part(StateKind::kOptimizer, found.prefix, found.plain);
    if (const StateKey key = split_state_key(optimizer_key(found)); !key.parameter.empty())
      add_name(optimized_, without_inner_wrappers(stored_parameter(key)));
  }

  // Returns a parameter of the optimizer as the model's files name it. PEFT leaves the adapter's name out of them.
  std::string stored_parameter(const StateKey& key) const {
    return has_unnamed_adapter_ ? adapter_of(key.parameter).second : key.parameter;
  }

  // Returns "_1" for the second of several named optimizers.
  std::string number_of_named(std::string_view prefix) const {
    const auto found = named_optimizers_.find(prefix);
    if (named_optimizers_.size() < 2 || found == named_optimizers_.end()) return {};
    return "_" + std::to_string(std::distance(named_optimizers_.begin(), found));
  }
  void number_optimizers() {
    for (Part& part : catalog_.parts)
      if (part.kind == StateKind::kOptimizer) part.name += number_of_named(part.prefix);
  }

  // PEFT renames the layers that an adapter changes. If their weights are missing, the file contains only adapters,
  // possibly with biases of such layers. Adapters in their own files have no adapter names, and may include an
  // embedding.
  void find_adapters() {
    bool has_layers = false;
    for (const Tensor& t : catalog_.tensors()) {
      has_layers = has_layers || (t.name.find(kBaseLayer) != std::string::npos && !t.name.ends_with(".bias"));
      if (is_adapters(t.name)) adapters_.insert(adapter_of(t.name).first);
    }
    has_unnamed_adapter_ = adapters_.contains("") && adapters_.size() == 2;
    if (!has_layers || adapters_.contains("")) adapters_.clear();
  }
  // Modules that an adapter contains completely are stored next to the original ones.
  static bool is_adapters(std::string_view name) {
    return is_adapter(name) || name.find(kTrainedModule) != std::string_view::npos;
  }
  bool is_beside_weights(std::string_view name) const { return !adapters_.empty() && is_adapters(name); }

  // Returns the adapter of a name and the name without it: "default" and "x.lora_A.weight" for
  // "x.lora_A.default.weight", "default" and "x.weight" for "x.modules_to_save.default.weight".
  static std::pair<std::string, std::string> adapter_of(const std::string& name) {
    if (const std::size_t module = name.find(kTrainedModule); module != std::string::npos) {
      const std::size_t begin = module + kTrainedModule.size(), end = std::min(name.find('.', begin), name.size());
      return {name.substr(begin, end - begin), name.substr(0, module) + name.substr(end)};
    }
    const std::size_t word = name.find(".lora_"), at = word == std::string::npos ? word : name.find('.', word + 1);
    if (at == std::string::npos) return {{}, name};
    const std::size_t end = std::min(name.find('.', at + 1), name.size());
    if (end == name.size() && name.substr(at) == ".weight") return {{}, name};
    return {name.substr(at + 1, end - at - 1), name.substr(0, at) + name.substr(end)};
  }

  std::string adapter_key(const std::string& name) const {
    const auto [adapter, matrix] = adapter_of(without_inner_wrappers(name));
    const std::size_t base = matrix.find(kPeftPrefix);
    const std::string rest = base == std::string::npos ? unwrapped(matrix, {.prefix = model_wrapper_.prefix})
                                                       : matrix.substr(base + kPeftPrefix.size());
    return std::string(kAdapterPrefix) + (adapters_.size() > 1 ? adapter + "." : "") + std::string(kPeftPrefix) + rest;
  }

  std::string without_wrappers(std::string_view name) const {
    std::string out = without_inner_wrappers(name);
    if (adapters_.empty()) return out;
    for (const std::string_view word : {kBaseLayer, kUntrainedModule})  // fused parameters are wrapped several times
      for (std::size_t at; (at = out.find(word)) != std::string::npos;) out.erase(at + 1, word.size() - 1);
    return out;
  }

  void add_part(StateKind kind, std::string_view prefix, std::string name, std::string evidence = {}) {
    for (const Part& part : catalog_.parts)
      if (part.kind == kind && part.prefix == prefix) return;
    catalog_.parts.push_back({kind, std::string(prefix), std::move(name), std::move(evidence)});
  }

  // Finds averages under words that other modules have, too ("shadow."), anywhere in front of a model
  // ("callbacks.EMA.weights."). Under the prefix are a family's names, or those of the rest.
  void find_hinted_averages() {
    std::map<std::string, NamePatterns> groups;  // by prefix
    for (const auto& [pattern, alike] : model_)
      if (std::string prefix = prefix_of_average(pattern); !prefix.empty())
        groups[std::move(prefix)].emplace(pattern, alike);
    if (groups.size() > kMaxModels) return;
    for (auto& [prefix, names] : groups) {
      NamePatterns rest = model_;
      for (const auto& name : names) rest.erase(name.first);
      const bool is_known = !counted_.contains(prefix) && model_under(names, prefix, families_);
      if (!is_known && !are_alike(names, rest)) continue;
      model_ = std::move(rest);
      averages_.emplace(prefix, std::move(names));
    }
  }

  void find_averages() {
    if (given_.empty()) find_hinted_averages();
    if (averages_.empty()) return;
    const auto is_weight = [&](const Tensor& t) {
      const std::string name = renamed(t.key());
      return t.elements() > 1 && classified(name).kind == StateKind::kModel && !is_of_average(without_wrappers(name));
    };
    has_weights_ = std::any_of(catalog_.tensors().begin(), catalog_.tensors().end(), is_weight);
    // A counter and a flag next to an average are not a model (ema-pytorch's `step` and `initted`).
    if (!has_weights_) model_.clear();
  }

  // Returns the start of a name up to the first component that suggests an average, or that has torch's counter under
  // it; empty if there is none. What follows a number is inside a model.
  std::string prefix_of_average(std::string_view pattern) const {
    std::size_t begin = 0;
    for (std::size_t dot; (dot = pattern.find('.', begin)) != std::string_view::npos; begin = dot + 1) {
      if (pattern[begin] == '{') break;
      std::string prefix(pattern.substr(0, dot + 1));
      if (hints_at_average(pattern.substr(begin, dot - begin)) || counted_.contains(prefix)) return prefix;
    }
    return {};
  }

  bool is_of_average(std::string_view name) const {
    return std::any_of(averages_.begin(), averages_.end(), [&](const auto& average) {
      return average.first != chosen_ && name.starts_with(average.first);
    });
  }

  // Returns whether the state has models, none is chosen, and the name is in none of them.
  bool is_of_no_model(std::string_view name) const {
    return chosen_.empty() && !models_.empty() && std::none_of(models_.begin(), models_.end(), [&](const Part& model) {
             return name.starts_with(model.prefix);
           });
  }

  // Returns whether most of the names are those of `others`, in wrappers of their own.
  static bool are_alike(const NamePatterns& names, const NamePatterns& others) {
    const std::vector<std::string> prefixes = common_prefixes(others);
    return count_all(names) >= kFewNames && std::any_of(prefixes.begin(), prefixes.end(), [&](const auto& prefix) {
             PatternSet plain;
             for (const auto& [pattern, alike] : others)
               if (pattern.starts_with(prefix)) plain.insert(pattern.substr(prefix.size()));
             return wrapper_by_match(names, plain).known * 2 > count_all(names);
           });
  }

  // Finds several models: prefixes that differ in their last component.
  void find_models() {
    std::copy_if(catalog_.parts.begin(), catalog_.parts.end(), std::back_inserter(models_),
                 [](const Part& part) { return part.kind == StateKind::kModel; });
    if (!models_.empty() || find_averaged_pair()) return;
    const std::vector<std::string> bases = common_prefixes(model_);
    // A family may have several networks, such as a language model and a vision model.
    if (std::any_of(bases.begin(), bases.end(),
                    [&](const auto& base) { return known_without(model_, base, families_).is_all; }))
      return;
    for (const std::string& base : bases) {
      std::map<std::string, NamePatterns> groups;  // by prefix
      for (const auto& [pattern, alike] : model_) {
        const std::size_t dot = pattern.find('.', base.size());
        if (!pattern.starts_with(base) || dot == std::string::npos) continue;
        if (std::string prefix = pattern.substr(0, dot + 1); prefix.find('{') == std::string::npos)
          groups[std::move(prefix)].emplace(pattern, alike);
      }
      if (groups.size() > kMaxModels) continue;
      std::vector<Part> models;
      for (const auto& [prefix, names] : groups) {
        auto evidence = model_under(names, prefix, families_);
        if (!evidence) continue;
        std::string word = prefix.substr(base.size(), prefix.size() - base.size() - 1);
        models.push_back({StateKind::kModel, prefix, std::move(word), *std::move(evidence)});
      }
      if (models.size() < 2) continue;
      models_ = std::move(models);
      catalog_.parts.insert(catalog_.parts.end(), models_.begin(), models_.end());
      return;
    }
  }

  // Finds what Lightning's WeightAveraging saves: the average where the model is expected, and the model next to it.
  bool find_averaged_pair() {
    constexpr std::string_view kAverage = "state_dict", kModel = "current_model_state";
    std::vector<Part> models;
    for (const std::string_view word : {kModel, kAverage}) {
      const std::string prefix = std::string(word) + ".";
      if (std::none_of(model_.begin(), model_.end(), [&](const auto& name) { return name.first.starts_with(prefix); }))
        return false;
      models.push_back({StateKind::kModel, prefix, std::string(word),
                        word == kAverage ? std::string(kAverageOf) + std::string(kModel) : "the trained model"});
    }
    models_ = std::move(models);
    catalog_.parts.insert(catalog_.parts.end(), models_.begin(), models_.end());
    return true;
  }

  // Names an average "ema" or, if there are several, after the words of its prefix.
  void name_averages() {
    for (const auto& average : averages_) {
      const std::string& prefix = average.first;
      const std::string_view path = std::string_view(prefix).substr(0, prefix.size() - 1);
      add_part(StateKind::kOther, prefix, averages_.size() == 1 ? "ema" : std::string(path.substr(path.rfind('.') + 1)),
               "an average of the model's weights");
    }
  }

  // Uses another part instead of the model.
  Status choose() {
    for (Part& part : catalog_.parts)
      if (!given_.empty() && part.kind == StateKind::kModel && given_.starts_with(part.prefix))
        part.evidence = std::string(kGivenWith) + "--strip-prefix";
    if (wanted_.empty() || is_training_state(wanted_)) return {};
    std::vector<std::string> names;
    if (models_.empty() && !model_.empty()) names.emplace_back("model");
    for (Part& part : catalog_.parts) {
      names.push_back(part.name);
      if (part.name != wanted_ || part.kind == StateKind::kOptimizer) continue;
      if (!given_.empty())
        return usage_error("--part " + printable(wanted_) + " and --strip-prefix exclude each other; drop one of them");
      chosen_ = part.prefix;
      part.evidence = std::string(kGivenWith) + "--part";
      if (const auto average = averages_.find(chosen_); average != averages_.end())
        model_ = average->second;
      else
        std::erase_if(model_, [&](const auto& name) { return !name.first.starts_with(chosen_); });
    }
    if (std::find(names.begin(), names.end(), wanted_) != names.end()) return {};
    return usage_error(catalog_.where() + ": unknown part '" + printable(wanted_) + "'" + choices_text(wanted_, names));
  }

  bool is_training_state(const std::string& word) const {
    if (!is_training_word(word) || is_average_word(word)) return false;
    const auto has_it = [&](const auto& named) { return named.name.starts_with(word + "."); };
    return std::any_of(catalog_.tensors().begin(), catalog_.tensors().end(), has_it) ||
           std::any_of(catalog_.blobs.begin(), catalog_.blobs.end(), has_it);
  }

  Status find_wrappers() {
    PatternSet optimized;
    for (const auto& [pattern, alike] : optimized_) optimized.insert(pattern);
    if (!given_.empty()) {
      model_wrapper_ = {given_, "", std::string(kGivenWith) + "--strip-prefix"};
      if (std::none_of(model_.begin(), model_.end(),
                       [&](const auto& m) { return m.second.example.starts_with(given_); }))
        return usage_error(catalog_.where() + ": no tensor name begins with --strip-prefix '" + printable(given_) +
                           "'");
    } else if (models_.empty() || !chosen_.empty()) {
      model_wrapper_ = wrapper_by_family(model_, families_);
      const auto is_beside = [&](const auto& name) { return !name.first.starts_with(model_wrapper_.prefix); };
      if (is_model_ && std::any_of(model_.begin(), model_.end(), is_beside)) model_wrapper_ = {};
      // The family's model may be one of several networks that the optimizer trains.
      Wrapper trained = wrapper_by_match(model_, optimized);
      const bool is_part = trained.known > model_wrapper_.known && trained.prefix.size() < model_wrapper_.prefix.size();
      if (model_wrapper_.known == 0 || is_part) model_wrapper_ = std::move(trained);
      if (model_wrapper_.known == 0) model_wrapper_ = wrapper_by_words(model_);
      if (!model_wrapper_.prefix.starts_with(chosen_))
        model_wrapper_ = {chosen_, "", std::string(kGivenWith) + "--part"};
    }
    if (!model_.empty() && models_.empty() && chosen_.empty())
      add_part(StateKind::kModel, model_wrapper_.prefix, "model", model_wrapper_.evidence);
    // The optimizer may belong to the model without its head: then its names lack the "model." of the model's names.
    NamePatterns parameters;
    PatternSet plain;
    for (const auto& [pattern, alike] : model_) {
      if (!pattern.starts_with(model_wrapper_.prefix)) continue;
      plain.insert(unwrapped(pattern, model_wrapper_));
      parameters.emplace(unwrapped(pattern, model_wrapper_), alike);
    }
    optimizer_wrapper_ = model_.empty() ? wrapper_by_family(optimized_, families_)
                                        : wrapper_by_match(optimized_, plain, common_prefixes(parameters));
    return {};
  }

  std::string plain_key(const std::string& name) const {
    ClassifiedName found = classified(name);
    switch (found.kind) {
      case StateKind::kOptimizer: {
        found.plain += number_of_named(found.prefix);
        const StateKey key = split_state_key(optimizer_key(found));
        if (key.parameter.empty()) return optimizer_key(found);
        if (is_beside_weights(key.parameter)) return key.prefix + adapter_key(key.parameter) + key.suffix;
        return key.prefix + unwrapped(without_inner_wrappers(stored_parameter(key)), optimizer_wrapper_) + key.suffix;
      }
      case StateKind::kOther:
        return is_training_word(name.substr(0, name.find('.'))) ? name : "extra_state." + name;
      case StateKind::kModel:
        break;
    }
    if (as_stored_ && chosen_.empty()) return name;
    if (!averages_.empty() && !has_weights_ && chosen_.empty()) return "extra_state." + name;
    if (is_beside_weights(name)) return adapter_key(name);
    std::string clean = without_wrappers(name);
    if (is_of_average(clean) || is_of_no_model(clean)) return "extra_state." + name;
    return clean.starts_with(model_wrapper_.prefix) ? unwrapped(std::move(clean), model_wrapper_)
                                                    : "extra_state." + name;
  }

  static constexpr std::string_view kBaseLayer = ".base_layer.", kUntrainedModule = ".original_module.",
                                    kTrainedModule = ".modules_to_save.";

  Catalog& catalog_;
  std::set<std::string> adapters_;  // PEFT's names of adapters stored with the weights they change: "default"
  const std::vector<std::pair<std::string, std::string>>& renames_;
  std::set<std::string, std::less<>> named_optimizers_;  // prefixes of optimizers in a dict
  bool is_model_, as_stored_;
  bool is_optimizer_ = false;         // the catalog is an optimizer's state_dict
  bool has_unnamed_adapter_ = false;  // an adapter has a name in the optimizer and none in the model
  bool has_weights_ = false;          // model tensors other than scalars
  Families families_;
  std::string given_, wanted_;
  std::string chosen_;                            // prefix of the part chosen as the model; empty: none
  std::vector<Part> models_;                      // several models; empty: there is one
  std::map<std::string, NamePatterns> averages_;  // by prefix
  std::set<std::string> counted_;                 // prefixes of kAverageCount; may contain ""
  NamePatterns model_, optimized_;
  Wrapper model_wrapper_, optimizer_wrapper_;
};

}  // namespace

bool is_of_part(std::string_view key, std::string_view part) {
  if (part.empty()) return true;
  const bool is_word = is_optimizer_word(part) || (is_training_word(part) && !is_average_word(part));
  if (is_word) return key.starts_with(part) && key.substr(part.size()).starts_with('.');
  return state_kind(key) == StateKind::kModel;
}

bool is_of_average(const Catalog& catalog, std::string_view name) {
  return std::any_of(catalog.parts.begin(), catalog.parts.end(),
                     [&](const Part& part) { return part.kind == StateKind::kOther && name.starts_with(part.prefix); });
}

std::string doubt_about_model(const Catalog& catalog) {
  const auto model = std::find_if(catalog.parts.begin(), catalog.parts.end(),
                                  [](const Part& part) { return part.kind == StateKind::kModel; });
  const bool is_only = std::all_of(catalog.parts.begin(), catalog.parts.end(), [&](const Part& part) {
    return part.kind == StateKind::kOptimizer || &part == &*model;
  });
  if (model == catalog.parts.end() || !is_only || model->evidence.starts_with(kGivenWith)) return {};
  const std::vector<std::string> words = split(model->prefix, '.');
  if (std::any_of(words.begin(), words.end(), is_doubtful_word))
    return "the model's names begin with '" + printable(model->prefix) +
           "', which may mean an average of another model";
  const auto counts = [&](const Tensor& t) {
    return ("." + t.name).ends_with("." + std::string(kAverageCount)) &&
           model->prefix.starts_with(t.name.substr(0, t.name.size() - kAverageCount.size()));
  };
  const auto count = std::find_if(catalog.tensors().begin(), catalog.tensors().end(), counts);
  if (count == catalog.tensors().end()) return {};
  return "'" + printable(count->name) +
         "' is next to the model, so its weights may be an average (torch.optim.swa_utils.AveragedModel)";
}

std::string choice_of_part(const Catalog& catalog) {
  std::vector<std::string> models, averages;
  for (const Part& part : catalog.parts) {
    if (part.evidence.starts_with(kGivenWith)) return {};
    const std::string option = "--part " + shell_word(part.name);
    if (part.kind == StateKind::kModel)
      models.push_back(option + (part.evidence.starts_with(kAverageOf) ? " (" + part.evidence + ")" : ""));
    if (part.kind == StateKind::kOther) averages.push_back(option);
  }
  if (models.size() > 1) return "it contains several models; add " + join(models, ", or ");
  return models.empty() && !averages.empty() ? "it contains an average and no model; add " + join(averages, ", or ")
                                             : "";
}

bool is_megatron_adapter(std::string_view key) {
  constexpr std::string_view kModule = ".adapter.";
  const std::size_t at = key.find(kModule);
  if (at == std::string_view::npos) return false;
  std::string_view rest = key.substr(at + kModule.size());
  if (rest.starts_with("adapter_")) rest.remove_prefix(std::min(rest.find('.'), rest.size() - 1) + 1);
  return rest.starts_with("linear_in.") || rest.starts_with("linear_out.");
}

bool is_adapter(std::string_view key) {
  return key.starts_with("lora_") || key.find(".lora_") != std::string_view::npos || key.starts_with(kAdapterPrefix) ||
         is_megatron_adapter(key);
}

bool is_bare_optimizer(const Catalog& catalog) {
  const auto is_state = [](const auto& value) { return is_of_optimizer(value.name); };
  const auto is_group = [](const auto& value) { return value.name.starts_with("param_groups."); };
  return std::all_of(catalog.tensors().begin(), catalog.tensors().end(), is_state) &&
         std::all_of(catalog.blobs.begin(), catalog.blobs.end(), is_state) &&
         (std::any_of(catalog.blobs.begin(), catalog.blobs.end(), is_group) ||
          std::any_of(catalog.tensors().begin(), catalog.tensors().end(), is_group));
}

Status find_parts(Catalog& catalog, const KeyChanges& changes, bool is_model, Families families) {
  return PartFinder(catalog, changes, is_model, families).find();
}

}  // namespace reshard
