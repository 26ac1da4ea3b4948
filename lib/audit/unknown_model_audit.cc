// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/unknown_model_audit.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <span>

#include "lib/audit/architecture_audit.h"
#include "lib/audit/vocabulary.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "lib/model/family.h"
#include "lib/model/member_names.h"
#include "lib/model/parts.h"
#include "lib/model/quantization.h"
#include "lib/model/unknown_family.h"

namespace reshard {
namespace {

using Words = std::span<const std::string_view>;

// ---- Numbers of the config

// A number in the config or in one of its parts.
struct Field {
  std::string name;  // with its part: "text_config.vocab_size"
  std::string_view member;
  Index value = 0;
  const ModelConfig* of = nullptr;
};

bool contains_any(std::string_view text, Words words) {
  return std::any_of(words.begin(), words.end(),
                     [&](std::string_view word) { return text.find(word) != std::string_view::npos; });
}

bool is_one_of(std::string_view text, Words words) {
  return std::find(words.begin(), words.end(), text) != words.end();
}

// Returns all positive numbers of a config and its parts. A config may repeat members of its text_config; the
// text_config's value is used.
std::vector<Field> fields_of(const ModelConfig& config) {
  std::vector<Field> out;
  const auto add = [&](const ModelConfig& of) {
    const std::string prefix = of.part.empty() ? "" : of.part + ".";
    of.each_number([&](std::string_view name, Index value) {
      if (value > 0) out.push_back({prefix + std::string(name), name.substr(name.rfind('.') + 1), value, &of});
    });
  };
  for (const ModelConfig& part : config.parts) add(part);
  const std::size_t of_parts = out.size();
  add(config);
  std::set<std::pair<std::string, Index>> said;
  for (std::size_t i = 0; i < of_parts; ++i) said.emplace(out[i].name, out[i].value);
  for (std::size_t i = of_parts; i < out.size();)
    if (said.contains({"text_config." + out[i].name, out[i].value}))
      out.erase(out.begin() + i);
    else
      ++i;
  return out;
}

std::vector<Field> fields_named(const std::vector<Field>& fields, Words members) {
  std::vector<Field> out;
  std::copy_if(fields.begin(), fields.end(), std::back_inserter(out),
               [&](const Field& f) { return is_one_of(f.member, members); });
  return out;
}

// Returns whether a number with one of these words in its name has this value.
bool is_said(const std::vector<Field>& fields, Words words, Index value) {
  return std::any_of(fields.begin(), fields.end(), [&](const Field& f) {
    return f.value == value && contains_any(f.member, words) && !f.member.ends_with("_id");
  });
}
bool is_said(const std::vector<Field>& fields, Index value) {
  return std::any_of(fields.begin(), fields.end(),
                     [&](const Field& f) { return f.value == value && !f.member.ends_with("_id"); });
}

// Adds the numbers of all members that are called ratios, also those in lists and parts: "assign_mlp_ratio": [0.5, 4].
void add_ratios(const Json& json, bool is_ratio, std::vector<double>& out) {
  if (const auto number = json.as_double(); number && is_ratio) out.push_back(*number);
  if (const auto items = json.as_array())
    for (const Json& item : *items) add_ratios(item, is_ratio, out);
  if (const auto members = json.as_object())
    for (const Json::Member& member : *members)
      add_ratios(member.value, member.key.find("ratio") != std::string::npos, out);
}

// ---- Sizes of the tensors

// A list of numbered modules with a common prefix.
struct ModuleList {
  std::set<Index> numbers;
  bool holds_modules = false;  // and not weights alone: "layers.0.mlp.weight", but not "layers.0.weight"
  Index size() const { return *numbers.rbegin() + 1; }
  bool is_whole() const { return std::ssize(numbers) == size(); }
};

// A checkpoint's model tensors, without adapters, buffers and tensors added by quantization.
struct StoredTensors {
  std::vector<NamedTensor> all;
  std::set<std::string> others;                      // names of the excluded tensors
  std::map<std::string, ModuleList> lists, experts;  // the first number of each name; those of "experts"
};

void add_numbers(const std::string& name, StoredTensors& out) {
  bool is_first = true;
  for (std::size_t at = 0; (at = name.find('.', at)) != std::string::npos; ++at) {
    const auto number = as_number(std::string_view(name).substr(at + 1, name.find('.', at + 1) - at - 1));
    if (!number || name.find('.', at + 1) == std::string::npos) continue;
    const std::string prefix = name.substr(0, at);
    if (is_first) {
      ModuleList& list = out.lists[prefix];
      list.numbers.insert(*number);
      list.holds_modules = list.holds_modules || name.find('.', name.find('.', at + 1) + 1) != std::string::npos;
    }
    if (prefix.ends_with("experts")) out.experts[prefix].numbers.insert(*number);
    is_first = false;
  }
}

StoredTensors stored_tensors(const Catalog& catalog, const ModelConfig& config) {
  StoredTensors out;
  const PackedWeights packed = find_packed(catalog, &config);
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i) {
    const Tensor& t = catalog.tensors()[i];
    StateKey key = split_state_key(t.key());
    if (key.kind != StateKind::kModel || is_adapter(t.key()) || t.key().starts_with(kPeftPrefix)) continue;
    add_numbers(key.parameter, out);
    if (!t.is_buffer && t.elements() > 0 && !packed.is_of(i))
      out.all.push_back({&t, std::move(key.parameter)});
    else
      out.others.insert(std::move(key.parameter));
  }
  for (const PackedWeight& weight : packed.weights) out.others.insert(weight.name);
  return out;
}

std::string_view last_parts(std::string_view name, int count) {
  std::size_t at = name.size();
  for (int i = 0; i < count && at != std::string_view::npos; ++i)
    at = at == 0 ? std::string_view::npos : name.rfind('.', at - 1);
  return at == std::string_view::npos ? name : name.substr(at + 1);
}

// ---- Comparing both

// The sizes that tensors have in one role, with the tensors of each size.
using Sizes = std::map<Index, std::vector<const Tensor*>>;

// A number of the config that no tensor has in its role, and a size in that role that no other number explains.
struct Contradiction {
  Field field;
  Index size = 0;
  std::vector<const Tensor*> tensors;
};

class UnknownModel {
 public:
  UnknownModel(const Catalog& catalog, const ModelConfig& config)
      : config_(config), fields_(fields_of(config)), stored_(stored_tensors(catalog, config)), catalog_(catalog) {}

  UnknownModelAudit audit() {
    by_class_ = audit_architecture(stored_.all, stored_.others, config_, {});
    check_width();
    const bool is_other = !findings_.empty();
    check_vocabulary();
    check_layers();
    check_experts();
    check_inner();
    check_heads();
    check_positions();
    check_types();
    for (Finding& f : findings_)
      if (is_other && f.id != "config-other") f.causes.emplace_back("config-other");
    ArchitectureAudit known = contradicted_.empty()
                                  ? std::move(by_class_)
                                  : audit_architecture(stored_.all, stored_.others, config_, contradicted_);
    std::move(known.findings.begin(), known.findings.end(), std::back_inserter(findings_));
    return {std::move(findings_), std::move(compared_), std::move(known.compared), std::move(known.skipped),
            known.unknown};
  }

 private:
  static constexpr std::string_view kInner[] = {"intermediate_size", "ffn_dim",         "d_ff",    "encoder_ffn_dim",
                                                "decoder_ffn_dim",   "ffn_hidden_size", "n_inner", "mlp_dim",
                                                "ffn_size",          "hidden_dim",      "d_inner"};
  static constexpr std::string_view kPositions[] = {"max_position_embeddings", "n_positions", "max_source_positions",
                                                    "max_target_positions", "n_ctx"};
  static constexpr std::string_view kExperts[] = {"num_experts", "num_local_experts", "n_routed_experts",
                                                  "moe_num_experts", "n_experts"};

  // Calls `visit(tensor, sizes)` for each tensor with the given number of dimensions.
  template <typename Visit>
  Sizes sizes_where(int rank, Visit visit) const {
    Sizes out;
    for (const NamedTensor& t : stored_.all)
      if (t.tensor->shape.rank() == rank) visit(t, out);
    return out;
  }

  // `has(sizes, value)` returns whether tensors have that size. `explains(size)` returns whether another number of the
  // config explains that size.
  template <typename Has, typename Explains>
  std::optional<Contradiction> compare(const std::string& check, const std::vector<Field>& fields, const Sizes& sizes,
                                       Has has, Explains explains) {
    if (sizes.empty()) return {};
    std::optional<Field> without;
    for (const Field& field : fields) {
      if (has(field.value)) {
        compared_.push_back({check, field.name});
      } else if (!without) {
        without = field;
      }
    }
    if (!without) return {};
    const auto is_unexplained = [&](Index size) {
      return !explains(size) &&
             std::none_of(fields.begin(), fields.end(), [&](const Field& f) { return f.value == size; });
    };
    std::optional<Contradiction> out;
    for (const auto& [size, tensors] : sizes)
      if (is_unexplained(size) && (!out || tensors.size() > out->tensors.size()))
        out = Contradiction{*without, size, tensors};
    if (out) compared_.push_back({check, without->name});
    if (out) contradicted_.insert(without->name);
    return out;
  }

  Finding& add(Severity severity, std::string id, std::string what, const std::vector<const Tensor*>& tensors) {
    Finding f{severity, std::move(id), {}, std::move(what), {}, "", ""};
    for (const Tensor* t : tensors) f.tensors.push_back(t->name);
    return findings_.emplace_back(std::move(f));
  }

  // Returns "config.json says hidden_size = 384".
  std::string said(const Field& field) const {
    return config_.path + " says " + printable(field.name) + " = " + with_commas(field.value);
  }

  // Reports a size that is a fraction of the config's number (a tensor-parallel part), or any other size.
  void report_size(const Contradiction& c, Index expected, const std::string& formula, std::string_view what) {
    const bool is_part = c.size > 1 && expected % c.size == 0;
    Finding& f = add(Severity::kError, is_part ? "shape-part" : "shape-other",
                     with_commas(c.size) + " " + std::string(what) + ", and " + said(c.field), c.tensors);
    if (!formula.empty()) f.why.push_back(formula + " = " + with_commas(expected));
    if (!is_part) {
      f.advice = "The config.json belongs to another model, or the model was changed after it was written.";
      return;
    }
    f.why.push_back(with_commas(c.size) + " is 1/" + with_commas(expected / c.size) + " of " + with_commas(expected) +
                    ": one of " + with_commas(expected / c.size) + " tensor-parallel parts");
    f.advice = "Look for the files of the other ranks, or save again with the tensors gathered.";
  }

  // ---- Width

  static bool is_norm(std::string_view name) {
    static constexpr std::string_view kNorms[] = {"norm", "ln_", "layernorm", "LayerNorm"};
    return name.ends_with(".weight") && contains_any(last_parts(name, 2), kNorms);
  }

  // Compares the config's width with the most frequent sizes of norms and the widths of embeddings.
  void check_width() {
    Sizes sizes = sizes_where(2, [&](const NamedTensor& t, Sizes& out) {
      if (is_vocabulary(t.name)) out[t.tensor->shape[1]].push_back(t.tensor);
    });
    const Sizes norms = sizes_where(1, [&](const NamedTensor& t, Sizes& out) {
      if (is_norm(t.name)) out[t.tensor->shape[0]].push_back(t.tensor);
    });
    const auto most = std::max_element(norms.begin(), norms.end(),
                                       [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
    if (most != norms.end())
      sizes[most->first].insert(sizes[most->first].end(), most->second.begin(), most->second.end());
    const auto has = [&](Index value) { return sizes.contains(value) || norms.contains(value); };
    const auto c = compare("shape", fields_named(fields_, kWidthNames), sizes, has,
                           [&](Index size) { return is_said(fields_, size); });
    if (!c || !is_width_of_layers(c->size) || is_matrix_of_width(c->field.value)) return;
    Finding& f = add(Severity::kError, "config-other",
                     config_.path + " belongs to another model: " + printable(c->field.name) + " = " +
                         with_commas(c->field.value) + ", and " + count_of(std::ssize(c->tensors), "tensor") +
                         " of the checkpoint " + (c->tensors.size() == 1 ? "has " : "have ") + with_commas(c->size),
                     {});
    f.why.push_back("for example " + printable(c->tensors[0]->name) + " " + to_string(c->tensors[0]->shape));
    f.advice = "Add --config with the config.json of the run itself.";
  }

  // Returns whether most matrices of layers have this size, as in transformers. Convolutions need not have it.
  bool is_width_of_layers(Index size) const {
    Index all = 0, with = 0;
    for (const NamedTensor& t : stored_.all) {
      if (t.tensor->shape.rank() != 2) continue;
      ++all;
      with += t.tensor->shape[0] == size || t.tensor->shape[1] == size;
    }
    return with > 1 && 2 * with >= all;
  }

  // Returns whether a square matrix has this width: a projection of a part of the model.
  bool is_matrix_of_width(Index width) const {
    return std::any_of(stored_.all.begin(), stored_.all.end(), [&](const NamedTensor& t) {
      return t.tensor->shape.rank() == 2 && t.tensor->shape[0] == width && t.tensor->shape[1] == width;
    });
  }

  // ---- Vocabulary

  bool is_vocabulary(std::string_view name) const {
    static constexpr std::string_view kLeaves[] = {"shared.weight", "token_embedding.weight", "word_embedding.weight",
                                                   "tok_embeddings.weight", "predictions.decoder.weight"};
    return is_embedding(name, config_.families) || is_one_of(last_parts(name, 2), kLeaves) ||
           last_parts(name, 2) == "lm_head.weight" || last_parts(name, 3) == "predictions.decoder.weight";
  }

  // Returns whether rows may exceed the words: multimodal models have a few more rows (for images), audio models one
  // table for several codes.
  bool has_other_tokens(Index rows) const {
    static constexpr std::string_view kCodes[] = {"codebook"};
    if (std::any_of(fields_.begin(), fields_.end(), [](const Field& f) { return contains_any(f.member, kCodes); }))
      return true;
    const std::vector<Field> words = fields_named(fields_, kVocabularyNames);
    return !config_.parts.empty() && std::any_of(words.begin(), words.end(), [&](const Field& f) {
      return rows > f.value && rows <= f.value + kMaxFurtherTokens;
    });
  }

  void check_vocabulary() {
    static constexpr std::string_view kRelated[] = {"vocab", "words", "codebook", "code", "num_tokens", "token_num"};
    const Sizes sizes = sizes_where(2, [&](const NamedTensor& t, Sizes& out) {
      if (is_vocabulary(t.name)) out[t.tensor->shape[0]].push_back(t.tensor);
    });
    // The embedding of a part may have a name of its own: "embed_text_tokens.weight".
    const Sizes rows =
        sizes_where(2, [](const NamedTensor& t, Sizes& out) { out[t.tensor->shape[0]].push_back(t.tensor); });
    const auto c = compare(
        "vocabulary", fields_named(fields_, kVocabularyNames), sizes, [&](Index value) { return rows.contains(value); },
        [&](Index size) { return is_said(fields_, kRelated, size) || has_other_tokens(size); });
    if (!c || catalog_.vocabulary == c->field.value) return;
    std::vector<VocabularyTensor> tensors;
    for (const Tensor* t : c->tensors) tensors.push_back({t->name, t->shape[0], t->shape[1] * byte_size(t->dtype)});
    const Index heads = c->field.of->num_attention_heads();
    for (Finding& f :
         audit_vocabulary(tensors, {config_.path, c->field.value, heads, catalog_.lacks_optimizer, c->field.name}))
      findings_.push_back(std::move(f));
  }

  // ---- Layers

  static bool is_layer_list(std::string_view prefix) {
    static constexpr std::string_view kLayers[] = {"layers", "layer", "blocks", "block", "h", "resblocks"};
    return is_one_of(prefix.substr(prefix.rfind('.') + 1), kLayers);
  }

  // Returns whether a prefix such as "decoder.layers" or "model.decoder.layers" is the stack of this name.
  static bool is_stack_of(std::string_view prefix, std::string_view word) {
    if (prefix.starts_with("model.")) prefix.remove_prefix(6);
    return prefix.starts_with(word) && prefix.substr(word.size()).starts_with('.');
  }

  // Returns the numbers that may be the depth of a stack. With two stacks the config may have one for each:
  // "encoder_layers" is the depth of "model.encoder.layers".
  std::vector<Field> depths_of(std::string_view prefix) const {
    const std::vector<Field> all = fields_named(fields_, kDepthNames);
    for (const std::string_view word : {"decoder", "encoder"}) {
      if (!config_.parts.empty() || !is_stack_of(prefix, word)) continue;
      std::vector<Field> own;
      std::copy_if(all.begin(), all.end(), std::back_inserter(own),
                   [&](const Field& f) { return f.member.find(word) != std::string_view::npos; });
      if (!own.empty()) return own;
    }
    return all;
  }

  // Returns whether the config's list of layer types has this many entries of one type, or of the others.
  bool is_of_types(Index size) const {
    std::map<std::string_view, Index> counts;
    Index all = 0;
    for (; !config_.layer_type(all).empty(); ++all) ++counts[config_.layer_type(all)];
    return counts.size() > 1 && std::any_of(counts.begin(), counts.end(), [&](const auto& entry) {
             return entry.second == size || all - entry.second == size;
           });
  }

  bool explains_depth(Index size) const {
    static constexpr std::string_view kRelated[] = {"layer", "depth", "block", "stage", "group"};
    bool is_length = false;
    // The number of layers in stages of repeated blocks (EfficientNet) is known only to the model's code.
    const auto look = [&](std::string_view name, Index length) {
      is_length = is_length || length == size || name.find("repeat") != std::string_view::npos;
    };
    config_.each_list(look);
    for (const ModelConfig& part : config_.parts) part.each_list(look);
    // The last layer of a detector's queries may be its head.
    static constexpr std::string_view kQueries[] = {"num_queries"};
    const bool is_detector = !fields_named(fields_, kQueries).empty();
    return is_length || is_of_types(size) || is_said(fields_, kRelated, size) ||
           (is_detector && is_said(fields_, kRelated, size + 1));
  }

  void check_layers() {
    std::set<std::string> reported;
    std::set<Index> counts;
    for (const auto& [prefix, list] : stored_.lists) counts.insert(list.size());
    for (const auto& entry : stored_.lists) {
      const std::string& prefix = entry.first;
      const ModuleList& list = entry.second;
      if (!is_layer_list(prefix) || !list.holds_modules) continue;
      const std::vector<Field> fields = depths_of(prefix);
      const auto same =
          std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return f.value == list.size(); });
      if (same != fields.end()) {
        compared_.push_back({"missing", same->name});
        if (!list.is_whole() && 2 * std::ssize(list.numbers) > list.size()) {
          contradicted_.insert(same->name);
          report_holes(prefix, list, *same);
        }
        continue;
      }
      const bool is_own = fields.size() < fields_named(fields_, kDepthNames).size();
      const auto other = std::find_if(fields.begin(), fields.end(),
                                      [&](const Field& f) { return is_own || !counts.contains(f.value); });
      if (other == fields.end() || list.size() < 2 || (!is_own && explains_depth(list.size()))) continue;
      if (!reported.insert(other->name).second) continue;
      compared_.push_back({"missing", other->name});
      contradicted_.insert(other->name);
      report_depth(prefix, list, *other);
    }
  }

  std::vector<const Tensor*> tensors_of(const std::string& prefix, Index first) const {
    std::vector<const Tensor*> out;
    for (const NamedTensor& t : stored_.all) {
      if (!t.name.starts_with(prefix + ".")) continue;
      const std::string_view rest = std::string_view(t.name).substr(prefix.size() + 1);
      const auto number = as_number(rest.substr(0, rest.find('.')));
      if (number && *number >= first) out.push_back(t.tensor);
    }
    return out;
  }

  void report_holes(const std::string& prefix, const ModuleList& list, const Field& field) {
    std::set<Index> gone;
    for (Index i = 0; i < list.size(); ++i)
      if (!list.numbers.contains(i)) gone.insert(i);
    add_missing(prefix, gone, field);
  }

  void report_depth(const std::string& prefix, const ModuleList& list, const Field& field) {
    if (list.size() > field.value) {
      Finding& f = add(Severity::kError, "extra-layers", "belong to layers that the model does not have",
                       tensors_of(prefix, field.value));
      f.why.push_back(said(field) + "; '" + printable(prefix) + "' has " + count_of(list.size(), "layer"));
      f.advice = "A loader drops them silently. Is it another model's config, or was the config edited?";
      return;
    }
    std::set<Index> gone;
    for (Index i = 0; i < std::min(field.value, list.size() + kMaxListed); ++i)
      if (!list.numbers.contains(i)) gone.insert(i);
    add_missing(prefix, gone, field);
  }

  void add_missing(const std::string& prefix, const std::set<Index>& gone, const Field& field) {
    Finding& f =
        add(Severity::kError, "missing-layers",
            (gone.size() == 1 ? "layer " : "layers ") + join(runs_of({gone.begin(), gone.end()}, " to "), ", ") +
                " of 0 to " + with_commas(field.value - 1) + " of '" + printable(prefix) + "' " +
                (gone.size() == 1 ? "is" : "are") + " missing",
            {});
    f.why.push_back(said(field) + "; nothing of " + (gone.size() == 1 ? "this layer" : "these layers") + " is stored");
    f.advice = "Look for the files of the other pipeline stages; if " + printable(field.name) +
               " is wrong, correct the config.";
  }

  // ---- Experts

  void check_experts() {
    if (by_class_.is_whole()) return;  // of other numbers of experts, the names would differ
    Sizes sizes;
    for (const auto& [prefix, list] : stored_.experts) sizes[list.size()];
    static constexpr std::string_view kRelated[] = {"expert"};
    const auto c = compare(
        "missing", fields_named(fields_, kExperts), sizes, [&](Index value) { return sizes.contains(value); },
        [&](Index size) { return is_said(fields_, kRelated, size); });
    if (!c) return;
    std::vector<std::string> lists;
    for (const auto& [prefix, list] : stored_.experts)
      if (list.size() == c->size) lists.push_back(printable(prefix));
    const bool is_less = c->size < c->field.value;
    Finding& f = add(is_less ? Severity::kError : Severity::kWarning, is_less ? "missing-experts" : "extra-tensors",
                     count_of(c->size, "expert") + " in each layer, and " + said(c->field), {});
    f.why.push_back("in " + some_of(lists));
    f.advice = is_less ? "Look for the files of the other ranks of expert parallelism."
                       : "A loader drops what the config does not describe.";
  }

  // ---- Sizes inside a layer

  static bool is_inner(std::string_view name) {
    static constexpr std::string_view kModules[] = {
        "mlp",           "ffn",  "feed_forward", "intermediate",   "fc1",
        "fc2",           "lin1", "lin2",         "DenseReluDense", "dense_h_to_4h",
        "dense_4h_to_h", "c_fc", "up_proj",      "down_proj",      "gate_proj"};
    return contains_any(last_parts(name, 4), kModules) && name.ends_with(".weight");
  }

  // Returns whether a size is two thirds of the config's number, rounded up: gated networks (LFM 2).
  bool is_two_thirds(Index size) const {
    static constexpr std::string_view kMultiple[] = {"block_multiple_of", "multiple_of"};
    const std::vector<Field> multiples = fields_named(fields_, kMultiple);
    const std::vector<Field> inner = fields_named(fields_, kInner);
    return std::any_of(multiples.begin(), multiples.end(), [&](const Field& multiple) {
      return std::any_of(inner.begin(), inner.end(), [&](const Field& f) {
        return size >= 2 * f.value / 3 && size <= 2 * f.value / 3 + multiple.value;
      });
    });
  }

  void check_inner() {
    const std::vector<Field> widths = fields_named(fields_, kWidthNames);
    const auto is_width = [&](Index n) {
      return std::any_of(widths.begin(), widths.end(), [&](const Field& f) { return f.value == n; });
    };
    static constexpr std::string_view kRouters[] = {"gate.weight", "router.weight"};
    const Sizes sizes = sizes_where(2, [&](const NamedTensor& t, Sizes& out) {
      if (is_one_of(last_parts(t.name, 2), kRouters)) return;
      if (by_class_.is_whole() && by_class_.proven.contains(t.tensor)) return;
      const Index rows = t.tensor->shape[0], columns = t.tensor->shape[1];
      if (is_inner(t.name) && is_width(rows) != is_width(columns))
        out[is_width(rows) ? columns : rows].push_back(t.tensor);
    });
    const auto has = [&](Index value) { return sizes.contains(value) || sizes.contains(2 * value) || is_width(value); };
    std::vector<double> ratios;
    add_ratios(config_.file, false, ratios);
    const auto is_ratio_of_width = [&](Index size) {
      return std::any_of(widths.begin(), widths.end(), [&](const Field& f) {
        const auto width = static_cast<double>(f.value), wanted = static_cast<double>(size);
        return std::any_of(ratios.begin(), ratios.end(), [&](double r) { return std::floor(r * width) == wanted; });
      });
    };
    const auto explains = [&](Index size) {
      return is_said(fields_, size) || (size % 2 == 0 && is_said(fields_, size / 2)) ||
             (size % 4 == 0 && is_width(size / 4)) || is_two_thirds(size) || is_ratio_of_width(size) ||
             (config_.length("block_types") && is_said(fields_, 2 * size));  // RecurrentGemma counts gate and up
    };
    if (const auto c = compare("shape", fields_named(fields_, kInner), sizes, has, explains))
      report_size(*c, c->field.value, "", "where the network of a layer is widest");
  }

  // Checks query, key and value matrices, whose rows are heads.
  void check_heads() {
    static constexpr std::string_view kKeys[] = {"k_proj.weight", "v_proj.weight", "wk.weight", "wv.weight"};
    const Sizes sizes = sizes_where(2, [&](const NamedTensor& t, Sizes& out) {
      if (is_one_of(last_parts(t.name, 2), kKeys)) out[t.tensor->shape[0]].push_back(t.tensor);
    });
    std::vector<Field> told;
    std::set<Index> rows_said;
    for (const Field& f : fields_) {
      const Index heads = f.member == "num_key_value_heads" || f.member.ends_with("attention_heads") ? f.value : 0;
      if (heads < 1) continue;
      for (const Field& dim : fields_)
        if (dim.member.find("head_dim") != std::string_view::npos || dim.member == "d_kv")
          rows_said.insert(heads * dim.value);
      for (const Field& width : fields_named(fields_, kWidthNames)) rows_said.insert(width.value / heads * heads);
      if (f.member == "num_key_value_heads" && f.of->head_dim() > 0) told.push_back({f.name, f.member, f.value, f.of});
    }
    for (const Field& f : told) {
      const Index expected = f.value * f.of->head_dim();
      const std::string formula = f.name + " " + with_commas(f.value) + " x head_dim " + with_commas(f.of->head_dim());
      Field product = f;
      product.value = expected;
      const auto c = compare(
          "shape", {product}, sizes, [&](Index value) { return sizes.contains(value); },
          [&](Index size) { return rows_said.contains(size) || is_said(fields_, size); });
      if (!c) continue;
      report_size({f, c->size, c->tensors}, expected, formula, "rows");
      return;
    }
  }

  void check_positions() {
    static constexpr std::string_view kLeaves[] = {"position_embeddings.weight", "wpe.weight",
                                                   "embed_positions.weight"};
    const Sizes sizes = sizes_where(2, [&](const NamedTensor& t, Sizes& out) {
      if (is_one_of(last_parts(t.name, 2), kLeaves)) out[t.tensor->shape[0]].push_back(t.tensor);
    });
    const auto has = [&](Index value) {
      return sizes.contains(value) || sizes.contains(value + 1) || sizes.contains(value + 2);
    };
    const auto explains = [&](Index size) {
      return is_said(fields_, size) || is_said(fields_, size - 1) || is_said(fields_, size - 2) || is_patches(size);
    };
    if (const auto c = compare("shape", fields_named(fields_, kPositions), sizes, has, explains))
      report_size(*c, c->field.value, "", "positions");
  }

  // Returns whether a size is an image's number of patches, plus up to two special tokens.
  bool is_patches(Index size) const {
    return std::any_of(fields_.begin(), fields_.end(), [&](const Field& f) {
      if (f.member != "image_size") return false;
      const Index patch = f.of->number("patch_size"), side = patch > 0 ? f.value / patch : 0;
      return size >= side * side && size <= side * side + 2;
    });
  }

  void check_types() {
    static constexpr std::string_view kTypes[] = {"type_vocab_size"};
    const Sizes sizes = sizes_where(2, [&](const NamedTensor& t, Sizes& out) {
      if (last_parts(t.name, 2) == "token_type_embeddings.weight") out[t.tensor->shape[0]].push_back(t.tensor);
    });
    if (const auto c = compare(
            "shape", fields_named(fields_, kTypes), sizes, [&](Index value) { return sizes.contains(value); },
            [&](Index size) { return is_said(fields_, kTypes, size); }))
      report_size(*c, c->field.value, "", "types of tokens");
  }

  static constexpr Index kMaxFurtherTokens = 8;
  static constexpr Index kMaxListed = 100'000;  // layers in a message

  const ModelConfig& config_;
  std::vector<Field> fields_;
  StoredTensors stored_;
  const Catalog& catalog_;
  ArchitectureAudit by_class_;  // without knowledge of the fields that the other checks contradict
  std::vector<Finding> findings_;
  std::vector<CheckedNumber> compared_;
  std::set<std::string> contradicted_;  // names of the contradicted fields
};

}  // namespace

bool UnknownModelAudit::has_compared(std::string_view check) const {
  return !architecture.empty() ||
         std::any_of(compared.begin(), compared.end(), [&](const CheckedNumber& n) { return n.check == check; });
}

UnknownModelAudit audit_unknown_model(const Catalog& catalog, const ModelConfig& config) {
  return UnknownModel(catalog, config).audit();
}

namespace {

// Returns a description of a model without a family: "model_type 'bert'".
std::string what_is_unknown(const ModelConfig& config) {
  const bool has_family = family_of_model_type(config.model_type, config.text_model_type, config.families) != nullptr;
  if (has_family && !config.quantization.empty()) return "models quantized with " + printable(config.quantization);
  if (has_family && !config.architecture.empty()) return "the names of " + printable(config.architecture);
  return "model_type '" + printable(config.model_type) + "'";
}

}  // namespace

std::string summary(const UnknownModelAudit& audit, const ModelConfig& config) {
  if (!audit.architecture.empty()) {
    std::string out = config.path + ": " + audit.architecture;
    if (audit.unknown > 0) out += "; not checked: " + count_of(audit.unknown, "tensor") + " of other names";
    if (audit.unknown > 0 && !config.quantization.empty()) out += ", as no family describes " + what_is_unknown(config);
    return out;
  }
  std::vector<std::string> names;
  for (const CheckedNumber& n : audit.compared)
    if (std::find(names.begin(), names.end(), n.field) == names.end()) names.push_back(printable(n.field));
  const std::string why = audit.skipped.empty() ? "no family describes " + what_is_unknown(config) : audit.skipped;
  if (names.empty()) return config.path + ": not checked: " + why;
  const std::string last = names.back();
  names.pop_back();
  return config.path + ": checked " + join(names, ", ") + (names.empty() ? "" : " and ") + last +
         "; not checked: other names and shapes, as " + why;
}

}  // namespace reshard
