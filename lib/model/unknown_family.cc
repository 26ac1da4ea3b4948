// SPDX-License-Identifier: Apache-2.0
#include "lib/model/unknown_family.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/model/architecture.h"
#include "lib/model/family.h"
#include "lib/model/member_names.h"
#include "lib/model/parameters.h"

namespace reshard {
namespace {

constexpr std::string_view kQueries[] = {"num_queries", "num_query_tokens"};  // of detectors, which have no vocabulary
constexpr std::string_view kChannels[] = {"num_channels", "in_channels", "in_chans"};
constexpr std::string_view kBands[] = {"num_mel_bins"};  // of audio models
constexpr std::string_view kLayerLists[] = {"layers_block_type", "layer_types", "block_types"};

constexpr Index kMaxWords = Index{1} << 32;

// Returns the last two components of a name, "embed_tokens.weight".
std::string_view leaf_of(std::string_view name) {
  const std::size_t last = name.rfind('.');
  if (last == std::string_view::npos || last == 0) return name;
  const std::size_t before = name.rfind('.', last - 1);
  return before == std::string_view::npos ? name : name.substr(before + 1);
}

// The names of embeddings and heads in all families.
struct VocabularyLeaves {
  std::set<std::string, std::less<>> embeddings, heads;

  void add(const Family& family) {
    for (const NameRule& rule : family.rules)
      if (rule.is_vocabulary() && rule.place != NameRule::Place::kLayer)
        (rule.place == NameRule::Place::kFirst ? embeddings : heads).emplace(leaf_of(rule.hf));
  }
  bool contain(std::string_view leaf) const { return embeddings.contains(leaf) || heads.contains(leaf); }
};
VocabularyLeaves vocabulary_leaves(Families families) {
  static const auto* const builtin = [] {
    auto* const out = new VocabularyLeaves;
    for (const Family* family : Families()) out->add(*family);
    return out;
  }();
  VocabularyLeaves leaves = *builtin;
  if (families.own()) leaves.add(*families.own());
  return leaves;
}

// Returns whether one of the members `names` has this value.
bool has_member_with(const ModelConfig& config, std::span<const std::string_view> names, Index value) {
  return value > 0 &&
         std::any_of(names.begin(), names.end(), [&](std::string_view name) { return config.number(name) == value; });
}

// The common structure of the names in a catalog.
struct Names {
  std::vector<const Tensor*> matrices, filters;
  std::map<std::string, std::set<Index>, std::less<>>
      lists;  // of numbered modules, keyed by the name before the number
  std::set<std::string, std::less<>> tops;

  bool has_list(Index modules) const {
    return std::any_of(lists.begin(), lists.end(),
                       [&](const auto& list) { return is_whole(list.second) && std::ssize(list.second) == modules; });
  }
  static bool is_whole(const std::set<Index>& numbers) { return *numbers.rbegin() == std::ssize(numbers) - 1; }
};

Names names_of(const Catalog& catalog) {
  Names out;
  for (const Tensor& t : catalog.tensors()) {
    const StateKey key = split_state_key(t.key());
    if (key.kind != StateKind::kModel) continue;
    const std::string_view name = key.parameter;
    out.tops.emplace(name.substr(0, name.find('.')));
    for (std::size_t at = 0; (at = name.find('.', at)) != std::string_view::npos; ++at) {
      std::string_view rest = name.substr(at + 1);
      const auto number = take_number(rest);
      if (number && rest.starts_with('.')) {
        out.lists[std::string(name.substr(0, at))].insert(*number);
        break;
      }
    }
    if (t.shape.rank() == 2 && t.shape[0] > 0) out.matrices.push_back(&t);
    if (t.shape.rank() > 2) out.filters.push_back(&t);  // [out, in, (frames, rows,) columns]
  }
  return out;
}

// Which numbers of a config (the model's or a part's) the tensors confirm.
struct Facts {
  bool has_width = false, has_layers = false;
};

// Returns whether a tensor has a row for each token or, in a detector, for each query.
bool has_rows(const Names& names, const ModelConfig& config, std::span<const std::string_view> rows) {
  return std::any_of(names.matrices.begin(), names.matrices.end(), [&](const Tensor* t) {
    return has_member_with(config, rows, t->shape[0]) && has_member_with(config, kWidthNames, t->shape[1]) &&
           t->shape[0] <= kMaxWords;
  });
}

// Returns whether a tensor has the shape of the filters for image patches or for audio bands.
bool has_filters(const Names& names, const ModelConfig& config) {
  const Index patch = config.number("patch_size");
  return std::any_of(names.filters.begin(), names.filters.end(), [&](const Tensor* t) {
    const bool sees = t->shape.rank() > 3;
    if (!has_member_with(config, kWidthNames, t->shape[0])) return false;
    return sees
               ? has_member_with(config, kChannels, t->shape[1]) && patch >= 1 && t->shape[t->shape.rank() - 1] == patch
               : has_member_with(config, kBands, t->shape[1]);
  });
}

bool has_layers(const Names& names, const ModelConfig& config) {
  return std::any_of(names.lists.begin(), names.lists.end(), [&](const auto& list) {
    const Index modules = std::ssize(list.second);
    return Names::is_whole(list.second) &&
           (has_member_with(config, kDepthNames, modules) ||
            std::any_of(std::begin(kLayerLists), std::end(kLayerLists),
                        [&](std::string_view member) { return config.length(member) == modules; }));
  });
}

Facts facts_of(const Names& names, const ModelConfig& config) {
  return {has_rows(names, config, kVocabularyNames) || has_rows(names, config, kQueries) || has_filters(names, config),
          has_layers(names, config)};
}

// Returns whether all parts with a number of layers are present.
bool has_all_parts(const Names& names, const ModelConfig& config) {
  return std::all_of(config.parts.begin(), config.parts.end(), [&](const ModelConfig& part) {
    return std::all_of(std::begin(kDepthNames), std::end(kDepthNames), [&](std::string_view member) {
      return part.number(member) < 1 || names.has_list(part.number(member));
    });
  });
}

// Returns whether modules have names that no model files have.
bool has_other_names(const Catalog& catalog, Families families) {
  if (convention_without_config(catalog, families)) return true;
  const auto detected = detect_family(catalog, nullptr, families);
  if (!detected || detected->convention == Convention::kHf || detected->convention == Convention::kTransformers)
    return false;
  return std::any_of(catalog.tensors().begin(), catalog.tensors().end(), [&](const Tensor& t) {
    const auto parsed = parse_name(*detected->family, split_state_key(t.key()).parameter);
    return parsed && parsed->stored && parsed->layer >= 0;
  });
}

// Returns whether all stored names are of the class and all those that each of its models has are stored, whatever
// their numbers.
bool has_names_of_class(const std::map<std::string, const Tensor*, std::less<>>& stored,
                        const Architecture& architecture) {
  std::set<std::string, std::less<>> known, needed;
  for (const ArchitectureRow& row : architecture.rows) {
    known.insert(pattern_of(row.name));
    if (row.condition.empty() && row.stands_in == NameScope::kEverywhere) needed.insert(pattern_of(row.name));
  }
  for (const auto& [name, tensor] : stored) {
    std::string_view rest = name;
    take(rest, architecture.prefix);
    const std::string pattern = pattern_of(rest);
    if (!known.contains(pattern)) return false;
    needed.erase(pattern);
  }
  return needed.empty() && !stored.empty();
}

// Does what the public function does, by the table of the config's class.
std::string foreign_prefix(const Catalog& catalog, const Architecture& architecture) {
  std::optional<std::string> shared;
  for (const Tensor& t : catalog.tensors()) {
    const StateKey key = split_state_key(t.key());
    if (key.kind != StateKind::kModel) continue;
    if (!shared) shared = key.parameter.substr(0, key.parameter.find('.') + 1);
    if (shared->empty() || !key.parameter.starts_with(*shared)) return {};
  }
  if (!shared || (architecture.has_prefix && architecture.prefix.starts_with(*shared))) return {};
  const bool is_own = std::any_of(architecture.rows.begin(), architecture.rows.end(),
                                  [&](const ArchitectureRow& row) { return row.name.starts_with(*shared); });
  return is_own ? "" : *shared;
}

// Returns whether the table that is derived from the config's class lists these tensors, all of them and no others. If
// the config has a value for which the table gives no sizes, only the names are compared.
bool is_of_class(const Catalog& catalog, const ModelConfig& config) {
  const auto architecture = find_architecture(config.model_type, config.architecture, config.families);
  if (!architecture || architecture->is_other_class || config.file.is_null()) return false;
  const std::string foreign = foreign_prefix(catalog, *architecture);
  std::map<std::string, const Tensor*, std::less<>> stored;
  for (const Tensor& t : catalog.tensors()) {
    const StateKey key = split_state_key(t.key());
    if (key.kind == StateKind::kModel) stored.emplace(key.parameter.substr(foreign.size()), &t);
  }
  const auto model = parameters_of(*architecture, config.file);
  if (!model) return model.error().code() == ErrorCode::kUnsupported && has_names_of_class(stored, *architecture);
  const auto first = stored.lower_bound(architecture->prefix);
  const bool has_prefix = first != stored.end() && first->first.starts_with(architecture->prefix);
  Index known = 0;
  for (const ArchitectureParameter& p : model->parameters) {
    const auto found = stored.find((p.row->is_base && has_prefix ? architecture->prefix : "") + p.name);
    if (found == stored.end() && p.is_required && p.row->stands_in == NameScope::kEverywhere) return false;
    if (found == stored.end()) continue;
    if (!p.fits(found->second->shape)) return false;
    ++known;
  }
  return known > 0 && known == std::ssize(stored);
}

}  // namespace

bool is_embedding(std::string_view parameter, Families families) {
  return vocabulary_leaves(families).embeddings.contains(leaf_of(parameter));
}

std::string foreign_prefix(const Catalog& catalog, const ModelConfig& config) {
  const auto architecture = find_architecture(config.model_type, config.architecture, config.families);
  return architecture && !architecture->is_other_class ? foreign_prefix(catalog, *architecture) : "";
}

bool is_config_of(const Catalog& catalog, const ModelConfig& config) {
  if (is_of_class(catalog, config)) return true;
  const Names names = names_of(catalog);
  Facts facts = facts_of(names, config);
  // If only the configs of parts describe the model, all parts must be present, and one of them has the words.
  for (const ModelConfig& part : config.parts) {
    if (facts.has_width && facts.has_layers) break;
    if (const Facts own = facts_of(names, part); own.has_width && own.has_layers && has_all_parts(names, config))
      facts = own;
  }
  const bool numbered_first = std::any_of(names.lists.begin(), names.lists.end(),
                                          [](const auto& list) { return list.first.find('.') == std::string::npos; });
  return facts.has_width && facts.has_layers && names.tops.size() > 1 && (!numbered_first || is_headless(config)) &&
         !has_other_names(catalog, config.families);
}

}  // namespace reshard
