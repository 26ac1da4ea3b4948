// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/adapter_operands.h"

#include <algorithm>

#include "lib/base/text.h"
#include "lib/convert/view/source_view.h"
#include "lib/device/convert.h"
#include "lib/model/parts.h"

namespace reshard {
namespace {

constexpr std::string_view kTrainedModule = ".modules_to_save.", kBaseLayer = ".base_layer.";
constexpr std::string_view kTrainedRows = ".token_adapter.trainable_tokens_delta";

struct PairWord {
  AdapterOperand::Kind kind;
  std::string_view word, end;  // the key's suffix after the module, and the key's ending
  bool is_embeddings;
};
constexpr PairWord kPairWords[] = {{AdapterOperand::Kind::kA, ".lora_A.", ".weight", false},
                                   {AdapterOperand::Kind::kB, ".lora_B.", ".weight", false},
                                   {AdapterOperand::Kind::kA, ".lora_embedding_A", ".lora_embedding_A", true},
                                   {AdapterOperand::Kind::kB, ".lora_embedding_B", ".lora_embedding_B", true}};

}  // namespace

AdapterOperand adapter_operand(std::string_view key) {
  if (const std::size_t at = key.find(kPeftPrefix); at != std::string_view::npos)
    key.remove_prefix(at + kPeftPrefix.size());
  for (const PairWord& word : kPairWords) {
    const std::size_t at = key.find(word.word);
    if (at == std::string_view::npos || !key.ends_with(word.end)) continue;
    return {word.kind, std::string(key.substr(0, at)), word.is_embeddings};
  }
  if (key.ends_with(kTrainedRows))
    return {AdapterOperand::Kind::kRows, std::string(key.substr(0, key.size() - kTrainedRows.size()))};
  if (is_adapter(key)) return {};
  std::string weight(key);
  if (const std::size_t at = weight.find(kTrainedModule); at != std::string::npos)
    weight.erase(at, weight.find('.', at + kTrainedModule.size()) - at);  // with the adapter's name
  for (std::size_t at; (at = weight.find(kBaseLayer)) != std::string::npos;) weight.erase(at, kBaseLayer.size() - 1);
  return {AdapterOperand::Kind::kWhole, weight};
}

std::string AdapterPair::changes(const std::string& module) const { return fused ? fused->full_name() : module; }

std::optional<std::size_t>& AdapterOperands::slot_of(const AdapterOperand& operand) {
  if (operand.kind == AdapterOperand::Kind::kWhole) return whole[operand.of];
  if (operand.kind == AdapterOperand::Kind::kRows) return rows[operand.of];
  AdapterPair& pair = pairs[operand.of];
  return operand.kind == AdapterOperand::Kind::kA ? pair.a : pair.b;
}

AdapterTensors::AdapterTensors(const Catalog& catalog, bool is_separate, const Selection& selection)
    : catalog_(catalog), is_separate_(is_separate), selection_(selection) {
  is_beside_weights_ = std::any_of(catalog.tensors().begin(), catalog.tensors().end(),
                                   [](const Tensor& t) { return t.key().starts_with(kAdapterPrefix); });
}

bool AdapterTensors::is_own(const Tensor& t) const {
  const bool is_selected = is_separate_ ? !any_glob_matches(selection_.exclude, t.name) : selects(selection_, t.name);
  if (!is_selected || state_kind(t.key()) == StateKind::kOptimizer) return false;
  if (is_beside_weights_) return t.key().starts_with(kAdapterPrefix);
  return is_separate_ || (is_adapter(t.key()) && !is_megatron_adapter(t.key()));
}

bool AdapterTensors::is_there() const {
  return std::any_of(catalog_.tensors().begin(), catalog_.tensors().end(), [&](const Tensor& t) {
    return is_own(t) && adapter_operand(t.key()).kind != AdapterOperand::Kind::kWhole;
  });
}

Error AdapterTensors::unknown(const Tensor& t, const std::string& why) const {
  return unsupported(catalog_.where() + ": " + tensor_text(t.name) + ": " + why +
                     "unsupported part of an adapter; expected lora_A or lora_B of a linear layer or embedding, a "
                     "whole weight, or rows of an embedding. " +
                     (is_separate_ ? "Merge the adapter with the library that trained it (PEFT: merge_and_unload)"
                                   : "Add --exclude '*lora_*' to leave the adapter out"));
}

Result<AdapterOperands> AdapterTensors::operands() const {
  AdapterOperands out;
  const auto& tensors = catalog_.tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    if (!is_own(t)) continue;
    const AdapterOperand operand = adapter_operand(t.key());
    const bool is_matrix = operand.kind != AdapterOperand::Kind::kWhole;
    if (operand.kind == AdapterOperand::Kind::kUnknown || (is_matrix && t.shape.rank() != 2) ||
        !can_convert(t.dtype, DType::kFloat32))
      return unknown(t, "");
    std::optional<std::size_t>& slot = out.slot_of(operand);
    if (slot)
      return unsupported(catalog_.where() + ": " + tensor_text(tensors[*slot].name) + " and " + tensor_text(t.name) +
                         ": several adapters of one layer; add --exclude to leave one of them out");
    slot = i;
    if (operand.is_of_pair()) out.pairs[operand.of].is_embeddings = operand.is_embeddings;
  }
  for (const auto& [module, pair] : out.pairs) {
    if (!pair.a || !pair.b)
      return corrupt(catalog_.where() + ": " + tensor_text(tensors[pair.a ? *pair.a : *pair.b].name) + ": its lora_" +
                     (pair.is_embeddings ? "embedding_" : "") + (pair.a ? "B" : "A") + " is missing");
    const Tensor &a = tensors[*pair.a], &b = tensors[*pair.b];
    if (a.shape[0] != b.shape[1] || a.shape[0] < 1)
      return corrupt(catalog_.where() + ": " + tensor_text(a.name) + " " + to_string(a.shape) + " and " +
                     tensor_text(b.name) + " " + to_string(b.shape) + ": expected as many rows of A as columns of B");
  }
  return out;
}

}  // namespace reshard
