// SPDX-License-Identifier: Apache-2.0
#include "formats/orbax/train_state.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_archive.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"

namespace reshard {
namespace {

constexpr std::string_view kOptimizer = "opt_state.", kAux = "nnx_aux.", kOther = "extra_state.";
constexpr std::string_view kRoot = "params.params.";
constexpr std::string_view kEmbedder = "token_embedder.", kStepState = "optimizer.param_groups.0.step";
constexpr std::string_view kModel = "model.", kEasyDelOptimizer = "tx.", kValue = ".value";
constexpr std::string_view kGemmaRoot = "transformer/";
constexpr std::string_view kLevanterEmbedding = "model.embeddings.token_embeddings.";

// Returns the prefix of a MaxText model's names, or nothing if this is not one.
std::optional<std::string> root_of_maxtext(const Catalog& catalog) {
  for (const Tensor& t : catalog.tensors()) {
    if (t.name.starts_with(kOptimizer) || t.name.starts_with(kAux)) continue;
    const std::size_t at = t.name.find(kEmbedder);
    if (at == 0 || (at != std::string::npos && t.name[at - 1] == '.')) return t.name.substr(0, at);
  }
  return std::nullopt;
}

// Returns whether this is a state of Levanter or EasyDeL, whose model is under "model.".
bool is_around_model(const Catalog& catalog) {
  const auto& all = catalog.tensors();
  const auto begins = [&](std::string_view with) {
    return [with](const Tensor& t) { return t.name.starts_with(with); };
  };
  return std::any_of(all.begin(), all.end(), begins(kLevanterEmbedding)) ||
         (std::any_of(all.begin(), all.end(), begins(kEasyDelOptimizer)) &&
          std::all_of(all.begin(), all.end(), [](const Tensor& t) {
            return t.name.starts_with(kModel) || t.name.starts_with(kEasyDelOptimizer);
          }));
}

// Writes "layers.0" as "layers_0", and drops a last component "value".
std::string usual_spelling(std::string_view name) {
  std::vector<std::string> parts = split(name, '.');
  if (parts.size() > 1 && parts.back() == "value") parts.pop_back();
  std::string out = parts.front();
  for (std::size_t i = 1; i < parts.size(); ++i) out += (is_digits(parts[i]) ? "_" : ".") + parts[i];
  return out;
}

// The name of a moment of optax's ScaleByAdamState, "opt_state.0.mu.params.decoder...", in its parts.
struct Moment {
  std::string_view of;      // the parameter's name
  std::string_view suffix;  // of the key
  std::string_view state;   // "opt_state.0."
};
std::optional<Moment> moment_of(std::string_view name) {
  if (!name.starts_with(kOptimizer) && !name.starts_with(kEasyDelOptimizer)) return std::nullopt;
  for (const auto& [word, suffix] : {std::pair(".mu.", kMomentSuffix), std::pair(".nu.", kSecondMomentSuffix)})
    if (const std::size_t at = name.find(word); at != std::string_view::npos)
      return Moment{name.substr(at + 4), suffix, name.substr(0, at + 1)};
  return std::nullopt;
}

class StateKeys {
 public:
  explicit StateKeys(const Catalog& catalog)
      : root_(root_of_maxtext(catalog)), is_around_model_(is_around_model(catalog)) {
    for (const Tensor& t : catalog.tensors())
      if (const auto moment = moment_of(t.name); moment && count_.empty())
        count_ = std::string(moment->state) + "count";
  }

  // Returns an empty key for a name that is its own key.
  std::string key(const std::string& name) const {
    if (name.starts_with(kGemmaRoot)) return with_dots(name);
    if (!root_ && !is_around_model_) return {};
    if (const auto moment = moment_of(name)) {
      const std::string parameter = is_around_model_ ? without_value(moment->of) : usual_spelling(moment->of);
      return "optimizer.state." + parameter + std::string(moment->suffix);
    }
    if (name == count_) return std::string(kStepState);
    if (is_around_model_) return name.starts_with(kModel) ? std::string() : std::string(kOther) + name;
    if (name == "step" || name.starts_with(kOptimizer)) return std::string(kOther) + name;
    if (name.starts_with(kAux)) return aux_key(name);
    return name.starts_with(*root_) ? *root_ + usual_spelling(name.substr(root_->size())) : std::string();
  }

 private:
  static std::string with_dots(std::string name) {
    std::replace(name.begin(), name.end(), '/', '.');
    return name;
  }

  static std::string without_value(std::string_view name) {
    if (name.ends_with(kValue)) name.remove_suffix(kValue.size());
    return std::string(name);
  }

  // A router's bias belongs to the model although NNX keeps it outside the parameters; the rest is other state.
  std::string aux_key(const std::string& name) const {
    const std::string usual = usual_spelling(name);
    return usual.ends_with(".gate.bias") ? *root_ + usual : std::string(kOther) + name;
  }

  std::optional<std::string> root_;  // of MaxText's names
  bool is_around_model_ = false;
  std::string count_;  // the name of Adam's step
};

// Returns the trainer's name for a key, or an empty text if it has none.
std::string tree_name(const std::string& key) {
  const StateKey parts = split_state_key(key);
  if (parts.kind == StateKind::kModel) return key.starts_with(kAux) ? key : std::string(kRoot) + key;
  if (parts.kind == StateKind::kOther && key.starts_with(kOther)) {
    const std::string rest = key.substr(kOther.size());
    return rest == "step" || rest.starts_with(kOptimizer) || rest.starts_with(kAux) ? rest : std::string();
  }
  if (key == kStepState) return "opt_state.0.count";
  if (parts.suffix == kMomentSuffix) return "opt_state.0.mu.params." + parts.parameter;
  if (parts.suffix == kSecondMomentSuffix) return "opt_state.0.nu.params." + parts.parameter;
  return {};
}

// Returns the path of a trainer's name in its tree: optax's chain of states is a list.
KeyPath path_of(const std::string& name) {
  KeyPath out;
  for (std::string& part : split(name, '.')) {
    const auto position = out.size() == 1 && name.starts_with(kOptimizer) ? parse_number(part) : std::nullopt;
    if (position)
      out.emplace_back(*position);
    else
      out.emplace_back(std::move(part));
  }
  return out;
}

// Adds a None for each position of optax's chain that has no state, as Orbax has it: JAX restores no list with gaps.
void add_empty_states(LayoutRequest& request) {
  std::set<Index> found;
  const auto add = [&](const KeyPath& path) {
    if (path.size() > 1 && path[0] == KeyPath::value_type("opt_state"))
      if (const auto* const position = std::get_if<Index>(&path[1])) found.insert(*position);
  };
  for (const TargetTensor& t : request.tensors) add(t.path);
  for (const TargetBlob& blob : request.blobs) add(blob.path);
  pickle::PickleWriter none;
  none.none();
  const std::string bytes = torch_archive::object_item(std::move(none).finish());
  for (Index i = 0; !found.empty() && i < *found.rbegin(); ++i)
    if (!found.contains(i)) {
      const std::string name = std::string(kOptimizer) + std::to_string(i);
      request.blobs.push_back({name, path_of(name), bytes});
    }
}

}  // namespace

void set_tree_names(LayoutRequest& request) {
  if (std::none_of(request.tensors.begin(), request.tensors.end(),
                   [](const TargetTensor& t) { return t.name == "token_embedder.embedding"; }))
    return;
  for (TargetTensor& t : request.tensors) {
    std::string name = tree_name(t.name);
    if (name.empty()) continue;
    t.plain_key = std::exchange(t.name, std::move(name));
    t.path = path_of(t.name);
  }
  for (TargetBlob& blob : request.blobs) {
    std::string name = state_kind(blob.name) == StateKind::kModel ? std::string() : tree_name(blob.name);
    if (name.empty()) continue;
    blob.path = path_of(name);
    blob.name = std::move(name);
  }
  add_empty_states(request);
}

void warn_of_adapters(Catalog& catalog) {
  constexpr std::string_view kFirst = "_lora_a", kSecond = "_lora_b";
  std::vector<std::string> found;
  for (const Tensor& t : catalog.tensors())
    if (t.name.ends_with(kFirst) || t.name.ends_with(kSecond)) found.push_back(printable(t.name));
  if (found.empty()) return;
  catalog.warnings.push_back(some_of(found) + ": adapters of MaxText or qwix, which are not merged into the weights. " +
                             "Merge them with MaxText's to_huggingface (load_parameters_path and " +
                             "lora.lora_restore_path) before a conversion");
}

void set_state_keys(Catalog& catalog) {
  const StateKeys keys(catalog);
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i)
    if (std::string key = keys.key(catalog.tensors()[i].name); !key.empty() && key != catalog.tensors()[i].name)
      catalog.tensor(i).plain_key = std::move(key);
  for (Blob& blob : catalog.blobs)
    if (std::string key = keys.key(blob.name); !key.empty() && key != blob.name) blob.plain_key = std::move(key);
}

}  // namespace reshard
