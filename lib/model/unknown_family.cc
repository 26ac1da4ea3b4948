#include "lib/model/unknown_family.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/model/family.h"

namespace reshard {
namespace {

// transformers.PretrainedConfig.attribute_map: one number under the names that its models give it.
constexpr std::string_view kWidths[] = {"hidden_size",   "d_model",        "n_embd",  "dim",
                                        "embed_dim",     "embedding_size", "emb_dim", "input_embedding_size",
                                        "embedding_dim", "n_embed"};
constexpr std::string_view kDepths[] = {"num_hidden_layers", "num_layers",         "n_layer",
                                        "n_layers",          "encoder_layers",     "decoder_layers",
                                        "num_blocks",        "num_encoder_layers", "num_decoder_layers"};
constexpr std::string_view kLayerLists[] = {"layers_block_type", "layer_types", "block_types"};

constexpr Index kMaxWords = Index{1} << 32;

// The last two parts of a name, "embed_tokens.weight".
std::string_view leaf_of(std::string_view name) {
  const std::size_t last = name.rfind('.');
  if (last == std::string_view::npos || last == 0) return name;
  const std::size_t before = name.rfind('.', last - 1);
  return before == std::string_view::npos ? name : name.substr(before + 1);
}

std::set<std::string, std::less<>> vocabulary_leaves() {
  std::set<std::string, std::less<>> out;
  for (const Family* family : families())
    for (const NameRule& rule : family->rules)
      if (rule.is_vocabulary()) out.emplace(leaf_of(rule.hf));
  return out;
}

// The member among `names` that has this value.
std::string_view member_with(const ModelConfig& config, std::span<const std::string_view> names, Index value) {
  const auto found = std::find_if(names.begin(), names.end(),
                                  [&](std::string_view name) { return value > 0 && config.number(name) == value; });
  return found == names.end() ? std::string_view() : *found;
}

// What the config says of a list of this many modules.
std::string depth_text(const ModelConfig& config, Index modules) {
  if (const std::string_view member = member_with(config, kDepths, modules); !member.empty())
    return std::string(member) + " = " + count_of(modules, "layer");
  for (const std::string_view list : kLayerLists)
    if (config.length(list) == modules) return "the " + count_of(modules, "layer") + " of " + std::string(list);
  return {};
}

}  // namespace

CommonFacts common_facts(const Catalog& catalog, const ModelConfig& config) {
  static const std::set<std::string, std::less<>> leaves = vocabulary_leaves();
  CommonFacts out;
  std::map<std::string, std::set<Index>, std::less<>> lists;  // of numbered modules, by what is before the number
  std::set<std::string, std::less<>> tops;
  std::string words, layers;
  for (const Tensor& t : catalog.tensors()) {
    const StateKey key = split_state_key(t.key());
    if (key.kind != StateKind::kModel) continue;
    const std::string_view name = key.parameter;
    tops.emplace(name.substr(0, name.find('.')));
    for (std::size_t at = 0; (at = name.find('.', at)) != std::string_view::npos; ++at) {
      std::string_view rest = name.substr(at + 1);
      const auto number = take_number(rest);
      if (number && rest.starts_with('.')) {
        lists[std::string(name.substr(0, at))].insert(*number);
        break;
      }
    }
    if (t.shape.rank() != 2 || t.shape[0] < 1 || config.vocab_size() > kMaxWords) continue;
    const std::string_view width = member_with(config, kWidths, t.shape[1]);
    if (width.empty()) continue;
    if (leaves.contains(leaf_of(name))) out.vocabulary.push_back(&t);
    if (t.shape[0] == config.vocab_size() && words.empty())
      words = printable(t.name) + " " + to_string(t.shape) + " is vocab_size x " + std::string(width);
  }
  bool numbered_first = false;
  for (const auto& [prefix, numbers] : lists) {
    numbered_first = numbered_first || prefix.find('.') == std::string::npos;
    const std::string depth = depth_text(config, std::ssize(numbers));
    if (!depth.empty() && *numbers.rbegin() == std::ssize(numbers) - 1 && layers.empty())
      layers = printable(prefix) + " has " + depth;
  }
  const auto detected = detect_family(catalog);
  const bool other_names =
      detected && detected->convention != Convention::kHf && detected->convention != Convention::kTransformers;
  out.is_its_model = !words.empty() && !layers.empty() && !numbered_first && tops.size() > 1 && !other_names;
  for (std::string* fact : {&words, &layers})
    if (!fact->empty()) out.confirmed.push_back(std::move(*fact));
  return out;
}

}  // namespace reshard
