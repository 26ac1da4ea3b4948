#include "lib/model/unknown_family.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/model/family.h"
#include "lib/model/parameters.h"

namespace reshard {
namespace {

// From transformers.PretrainedConfig.attribute_map: the names of the same number in different models.
constexpr std::string_view kWidths[] = {"hidden_size",
                                        "d_model",
                                        "n_embd",
                                        "dim",
                                        "embed_dim",
                                        "embedding_size",
                                        "emb_dim",
                                        "input_embedding_size",
                                        "embedding_dim",
                                        "n_embed",
                                        "word_embed_proj_dim"};
constexpr std::string_view kDepths[] = {
    "num_hidden_layers",  "num_layers",           "n_layer",           "n_layers",
    "encoder_layers",     "decoder_layers",       "num_blocks",        "num_encoder_layers",
    "num_decoder_layers", "num_layers_per_stack", "num_hidden_groups", "layers"};
constexpr std::string_view kWords[] = {"vocab_size", "decoder_vocab_size", "tgt_vocab_size"};
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

// Returns the member among `names` that has this value.
std::string_view member_with(const ModelConfig& config, std::span<const std::string_view> names, Index value) {
  const auto found = std::find_if(names.begin(), names.end(),
                                  [&](std::string_view name) { return value > 0 && config.number(name) == value; });
  return found == names.end() ? std::string_view() : *found;
}

// What the names in a catalog have in common.
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

// The facts on which a config (of the model or a part) and the tensors agree; empty: none.
struct Facts {
  std::string width, layers;
};

// Returns " of encoder.text_config".
std::string of_part(const ModelConfig& config) { return config.part.empty() ? "" : " of " + printable(config.part); }

// Describes a tensor with a row for each word, or for each query of a detector; empty if there is none.
std::string rows_of(const Names& names, const ModelConfig& config, std::span<const std::string_view> rows) {
  for (const Tensor* t : names.matrices) {
    const std::string_view words = member_with(config, rows, t->shape[0]);
    const std::string_view width = member_with(config, kWidths, t->shape[1]);
    if (!words.empty() && !width.empty() && t->shape[0] <= kMaxWords)
      return printable(t->name) + " " + to_string(t->shape) + " is " + std::string(words) + " x " + std::string(width) +
             of_part(config);
  }
  return {};
}

// Describes the filters for patches of images, or for bands of sound; empty if there are none.
std::string filters_of(const Names& names, const ModelConfig& config) {
  for (const Tensor* t : names.filters) {
    const bool sees = t->shape.rank() > 3;
    const std::string_view width = member_with(config, kWidths, t->shape[0]);
    const std::string_view input =
        sees ? member_with(config, kChannels, t->shape[1]) : member_with(config, kBands, t->shape[1]);
    const Index patch = config.number("patch_size");
    if (width.empty() || input.empty() || (sees && (patch < 1 || t->shape[t->shape.rank() - 1] != patch))) continue;
    return printable(t->name) + " " + to_string(t->shape) + " is " + std::string(width) + " x " + std::string(input) +
           (sees ? " x patches of patch_size" : "") + of_part(config);
  }
  return {};
}

Facts facts_of(const Names& names, const ModelConfig& config) {
  Facts out{rows_of(names, config, kWords), {}};
  if (out.width.empty()) out.width = rows_of(names, config, kQueries);
  if (out.width.empty()) out.width = filters_of(names, config);
  for (const auto& [prefix, numbers] : names.lists) {
    if (!Names::is_whole(numbers)) continue;
    const Index modules = std::ssize(numbers);
    std::string depth;
    if (const std::string_view member = member_with(config, kDepths, modules); !member.empty())
      depth = std::string(member) + " = " + count_of(modules, "layer");
    for (const std::string_view list : kLayerLists)
      if (depth.empty() && config.length(list) == modules)
        depth = "the " + count_of(modules, "layer") + " of " + std::string(list);
    if (depth.empty()) continue;
    out.layers = printable(prefix) + " has " + depth + of_part(config);
    break;
  }
  return out;
}

// Describes a number of layers that differs from a config with a single stack of layers. Empty if they agree, or if
// more than one list of modules may be the layers.
std::string other_depth(const Names& names, const ModelConfig& config) {
  if (names.lists.size() != 1 || !config.parts.empty() || config.num_prediction_layers() > 0) return {};
  const auto& [prefix, numbers] = *names.lists.begin();
  const Index modules = std::ssize(numbers);
  std::string_view member;
  for (const std::string_view name : kDepths) {
    if (config.number(name) < 1) continue;
    if (config.number(name) == modules || (!member.empty() && config.number(name) != config.number(member))) return {};
    if (member.empty()) member = name;
  }
  if (member.empty() || modules < 2 || !Names::is_whole(numbers)) return {};
  return printable(prefix) + " has " + count_of(modules, "layer") + " where " + config.path + " says " +
         std::string(member) + " " + with_commas(config.number(member));
}

// Returns whether all parts with a number of layers are present.
bool has_all_parts(const Names& names, const ModelConfig& config) {
  return std::all_of(config.parts.begin(), config.parts.end(), [&](const ModelConfig& part) {
    return std::all_of(std::begin(kDepths), std::end(kDepths), [&](std::string_view member) {
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

}  // namespace

bool is_embedding(std::string_view parameter, Families families) {
  return vocabulary_leaves(families).embeddings.contains(leaf_of(parameter));
}

CommonFacts common_facts(const Catalog& catalog, const ModelConfig& config) {
  const Names names = names_of(catalog);
  const VocabularyLeaves leaves = vocabulary_leaves(config.families);
  CommonFacts out;
  for (const Tensor* t : names.matrices)
    if (leaves.contain(leaf_of(split_state_key(t->key()).parameter)) &&
        !member_with(config, kWidths, t->shape[1]).empty() && config.vocab_size() <= kMaxWords)
      out.vocabulary.push_back(t);
  for (const Tensor* t : out.vocabulary)
    if (t->shape[0] < config.vocab_size())
      out.contradictions.push_back({t, "has " + count_of(t->shape[0], "row") + " where " + config.path +
                                           " says vocab_size " + with_commas(config.vocab_size())});
  if (std::string text = other_depth(names, config); !text.empty()) out.contradictions.push_back({nullptr, text});
  Facts facts = facts_of(names, config);
  // If only the configs of parts describe the model, all parts must be present, and one of them has the words.
  for (const ModelConfig& part : config.parts) {
    if (!facts.width.empty() && !facts.layers.empty()) break;
    if (Facts own = facts_of(names, part); !own.width.empty() && !own.layers.empty() && has_all_parts(names, config))
      facts = std::move(own);
  }
  const bool numbered_first = std::any_of(names.lists.begin(), names.lists.end(),
                                          [](const auto& list) { return list.first.find('.') == std::string::npos; });
  out.is_its_model = !facts.width.empty() && !facts.layers.empty() && names.tops.size() > 1 &&
                     (!numbered_first || is_headless(config)) && !has_other_names(catalog, config.families);
  for (std::string* fact : {&facts.width, &facts.layers})
    if (!fact->empty()) out.confirmed.push_back(std::move(*fact));
  return out;
}

}  // namespace reshard
