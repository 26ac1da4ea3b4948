// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <unordered_map>
#include <utility>

#include "lib/audit/metadata_audits.h"
#include "lib/base/checked.h"
#include "lib/base/file.h"
#include "lib/base/text.h"
#include "lib/model/config.h"
#include "lib/model/parts.h"
#include "lib/model/shapes.h"

namespace reshard {
namespace {

bool is_model(const Tensor& tensor) { return split_state_key(tensor.key()).kind == StateKind::kModel; }

void report_adapters(const Catalog& catalog, FindingList& findings) {
  std::vector<std::string> adapters;
  Index weights = 0;
  for (const Tensor& t : catalog.tensors()) {
    if (is_adapter(t.key()) && split_state_key(t.key()).kind != StateKind::kOptimizer)
      adapters.push_back(t.name);
    else if (is_model(t) && !t.key().starts_with(kPeftPrefix))  // nor modules that an adapter contains completely
      ++weights;
  }
  if (adapters.empty() || weights == 0) return;
  Finding& f = findings.add(Severity::kWarning, "adapter-unmerged");
  f.what = "adapters are stored next to the weights they change";
  f.why.push_back(count_of(std::ssize(adapters), "tensor") + " of adapters, " + with_commas(weights) + " of the model");
  f.tensors = std::move(adapters);
  f.advice =
      "A loader of the model drops them, and with them what they learned. Merge them into the weights (PEFT: "
      "merge_and_unload), or save the adapters separately.";
}

// Returns the shape that PEFT's config gives the prompt that replaces an adapter's matrices; nothing if it does not
// tell.
Result<std::optional<Dims>> shape_of_prompt(const Json& config) {
  const std::string_view type = TRY(config.get_string("peft_type"));
  const Index tokens = TRY(config.get_index("num_virtual_tokens")), width = TRY(config.get_index("token_dim"));
  if (type == "PREFIX_TUNING") {  // keys and values of each layer
    const auto tensors = checked_mul(TRY(config.get_index("num_layers")), 2);
    const auto columns = tensors ? checked_mul(*tensors, width) : std::nullopt;
    return columns ? std::optional(Dims{tokens, *columns}) : std::nullopt;
  }
  static constexpr std::string_view kOthers[] = {"PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT"};
  if (std::find(std::begin(kOthers), std::end(kOthers), type) == std::end(kOthers)) return std::optional<Dims>();
  const auto rows = checked_mul(tokens, TRY(config.get_index("num_transformer_submodules")));
  return rows ? std::optional(Dims{*rows, width}) : std::nullopt;
}

// Compares a trained prompt with the adapter's config.
void report_prompt(const Catalog& catalog, FindingList& findings) {
  const auto found = catalog.find(kPromptEmbeddings);
  const auto path = found ? find_beside(catalog, kAdapterConfigFile) : std::string();
  if (!path || path->empty()) return;
  const auto text = read_whole_file(*path, kMaxConfigBytes);
  const auto config = text ? parse_json(*text, *path) : Result<Json>(text.error());
  const auto expected = config ? shape_of_prompt(*config) : Result<std::optional<Dims>>(config.error());
  const Tensor& prompt = catalog.tensors()[found.value_or(0)];
  if (!expected || !*expected || **expected == prompt.shape) return;
  Finding& f = findings.add(Severity::kError, "adapter-prompt");
  f.what = "shape " + to_string(prompt.shape) + "; " + printable(*path) + " expects " + to_string(**expected);
  f.tensors = {prompt.name};
  f.advice = "The file and its config are of different adapters. Look for another copy of one of them.";
}

// Returns the name of the other matrix of a pair whose product is an adapter: lora_B of lora_A. Empty if it is none.
std::string other_of_pair(std::string_view key) {
  static constexpr std::pair<std::string_view, std::string_view> kPairs[] = {
      {".lora_A", ".lora_B"}, {".lora_embedding_A", ".lora_embedding_B"}, {".linear_in", ".linear_out"}};
  for (const auto& [a, b] : kPairs)
    for (const auto& [mine, other] : {std::pair(a, b), std::pair(b, a)}) {
      const std::size_t at = key.rfind(mine);
      if (at == std::string_view::npos) continue;
      const std::string_view rest = key.substr(at + mine.size());
      if ((!rest.empty() && rest.front() != '.') || rest.ends_with(".bias")) return {};
      return std::string(key.substr(0, at)) + std::string(other) + std::string(rest);
    }
  return {};
}

// Reports matrices of adapters without the other of their pair, or of another rank.
void report_adapter_pairs(const Catalog& catalog, FindingList& findings) {
  std::unordered_map<std::string_view, const Tensor*> adapters;
  for (const Tensor& t : catalog.tensors())
    if (is_adapter(t.key()) && split_state_key(t.key()).kind != StateKind::kOptimizer) adapters.emplace(t.key(), &t);
  std::vector<std::string> alone, differing;
  for (const Tensor& t : catalog.tensors()) {
    const auto own = adapters.find(t.key());
    const std::string other = own == adapters.end() ? "" : other_of_pair(t.key());
    if (other.empty()) continue;
    const auto found = adapters.find(other);
    if (found == adapters.end()) alone.push_back(t.name);
    const bool is_first = t.key().find("_A") != std::string::npos || t.key().find(".linear_in") != std::string::npos;
    if (found == adapters.end() || !is_first) continue;
    const Tensor& b = *found->second;
    if (t.shape.rank() > 1 && b.shape.rank() > 1 && t.shape[0] != b.shape[1])
      differing.insert(differing.end(), {t.name, b.name});
  }
  const auto add = [&](std::vector<std::string> tensors, const char* what) {
    if (tensors.empty()) return;
    Finding& f = findings.add(Severity::kError, "adapter-pair");
    f.what = what;
    f.tensors = std::move(tensors);
    f.advice = "An adapter is the product of both matrices. Look for another copy of it.";
  };
  add(std::move(alone), "the other matrix of the pair (lora_A and lora_B, or linear_in and linear_out) is missing");
  add(std::move(differing), "the matrices of a pair have different ranks (rows of the first, columns of the second)");
}

void report_placeholders(const Catalog& catalog, const Model& model, FindingList& findings) {
  std::vector<std::string> empty;
  Index weights = 0;
  for (const Tensor& t : catalog.tensors()) {
    if (!is_model(t)) continue;
    ++weights;
    if (is_placeholder(t, model)) empty.push_back(t.name);
  }
  if (empty.empty()) return;
  const bool is_one = empty.size() == 1;
  Finding& f = findings.add(Severity::kError, "placeholder");
  f.what = is_one ? "is empty; expected a weight" : "are empty; expected weights";
  f.why.push_back(with_commas(std::ssize(empty)) + " of " + count_of(weights, "tensor") + " of the model");
  f.why.emplace_back(
      "a rank that holds parts of its parameters (DeepSpeed's ZeRO stage 3, FSDP) leaves such placeholders in its "
      "state_dict() for those that were not gathered");
  f.lost = std::string(is_one ? "Its values are" : "Their values are") + " missing from this checkpoint.";
  f.tensors = std::move(empty);
  f.advice =
      "The ranks' own files have them: convert those, the training state of the same step, or save again with the "
      "parameters gathered (DeepSpeed's stage3_gather_16bit_weights_on_model_save).";
}

void report_same_keys(const Catalog& catalog, FindingList& findings) {
  std::unordered_map<std::string_view, const Tensor*> by_key;
  std::vector<std::string> lines;
  std::vector<std::string> names;
  Index parameters = 0;
  for (const Tensor& t : catalog.tensors()) {
    if (!is_model(t)) continue;
    const auto [it, is_new] = by_key.emplace(t.key(), &t);
    if (is_new) continue;
    ++parameters;
    names.insert(names.end(), {it->second->name, t.name});
    if (lines.size() < kShown)
      lines.push_back(printable(t.key()) + " is " + printable(it->second->name) + " " + to_string(it->second->shape) +
                      " and " + printable(t.name) + " " + to_string(t.shape));
  }
  if (parameters == 0) return;
  std::sort(names.begin(), names.end(), natural_less);
  names.erase(std::unique(names.begin(), names.end()), names.end());
  Finding& f = findings.add(Severity::kError, "name-duplicate");
  f.what = parameters == 1
               ? "both are the same parameter; only one can be loaded"
               : count_of(parameters, "parameter") + ", each stored under two names; only one can be loaded";
  f.tensors = std::move(names);
  f.why = std::move(lines);
  if (parameters > Index{kShown}) f.why.push_back("and " + with_commas(parameters - Index{kShown}) + " more like them");
  f.advice = "Find out which of them the training run updated. Add --exclude to leave the others out of a conversion.";
}

void report_contradicting_shapes(const Catalog& catalog, const Family& family, FindingList& findings) {
  const Status agree = check_shapes_agree(family, catalog);
  if (agree) return;
  Finding& f = findings.add(Severity::kError, "shape-contradiction");
  f.what = "has names of family " + family.name + ", but shapes that contradict each other";
  f.why.push_back(agree.error().message());
  f.advice = "Add its config.json with --config, so that each tensor can be checked.";
}

}  // namespace

bool is_placeholder(const Tensor& tensor, const Model& model) {
  if (tensor.elements() > 0 || !is_model(tensor)) return false;
  return model.family ? parse_name(*model.family, tensor.key()).has_value() : tensor.key().ends_with(".weight");
}

std::vector<Finding> audit_names(const Catalog& catalog, const Model& model) {
  FindingList findings;
  report_adapters(catalog, findings);
  report_adapter_pairs(catalog, findings);
  report_prompt(catalog, findings);
  report_placeholders(catalog, model, findings);
  if (model.is_described()) return findings.take();
  report_same_keys(catalog, findings);
  if (model.family) report_contradicting_shapes(catalog, *model.family, findings);
  return findings.take();
}

}  // namespace reshard
