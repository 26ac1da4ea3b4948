// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/requantization.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "lib/base/text.h"
#include "lib/convert/weights/packed_matrix.h"
#include "lib/convert/weights/quantizations.h"
#include "lib/device/convert.h"
#include "lib/model/family.h"

namespace reshard {
namespace {

bool is_float8(DType dtype, DType as) { return byte_size(dtype) == 1 && can_convert(dtype, as); }

// Fails if a float8 matrix would be converted without its scales: its elements alone are not the model's weights.
Status check_scales_are_applied(const SourceView& view, const DtypeOptions& typing) {
  if (!typing.dtype || byte_size(*typing.dtype) == 1) return {};
  const auto& tensors = view.catalog.tensors();
  std::unordered_map<std::string_view, std::size_t> scales;  // by the weight
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (const auto found = view.packed.find(tensors[i].name);
        found != view.packed.end() && !found->second.is_matrix && !view.applied.contains(i))
      scales.insert_or_assign(found->second.name, i);
  for (std::size_t i = 0; i < tensors.size() && !scales.empty(); ++i) {
    const Tensor& t = tensors[i];
    const auto packed = view.packed.find(t.name);
    if (packed == view.packed.end() || !packed->second.is_matrix || view.computed.contains(i)) continue;
    if (!is_float8(t.dtype, *typing.dtype)) continue;
    const std::string& native = view.native(t.name);
    if (typing.keeps(native, t.name)) continue;
    if (const auto found = scales.find(packed->second.name); found != scales.end())
      return unsupported(
          view.catalog.where() + ": " + tensor_text(native) + " is " + std::string(info(t.dtype).torch_name) +
          " next to " + tensor_text(view.native(tensors[found->second].name)) +
          ": without its scale its values would change as " + std::string(info(*typing.dtype).torch_name) +
          ", and it is unknown how the scales are applied (docs/quantization.md). Drop --dtype to keep both");
  }
  return {};
}

bool stacks_experts(const Family& family) {
  return std::any_of(family.rules.begin(), family.rules.end(),
                     [](const NameRule& rule) { return rule.stacks_experts(); });
}

// Returns whether models of the family have matrices that `quantization` applies to.
bool has_matrices(const Family& family, Quantization quantization) {
  if (quantization == Quantization::kFp8Tensor) return !stacks_experts(family);
  const Quantized expected = quantization == Quantization::kMxfp4 ? Quantized::kMxfp4 : Quantized::kFloat8;
  return std::any_of(family.rules.begin(), family.rules.end(),
                     [&](const NameRule& rule) { return rule.quantized == expected; });
}

// Returns a clause with the family's choices: "; --quantize fp8-tensor applies to this family".
std::string other_quantizations(const Family& family) {
  std::vector<std::string> out;
  for (const auto& [name, quantization] : kQuantizations)
    if (has_matrices(family, quantization)) out.push_back("--quantize " + std::string(name));
  return out.empty() ? "" : "; " + join(out, " or ") + " applies to this family";
}

// Fails if the output cannot store scales, or if the model has no matrices that can be quantized.
Status check_quantizes(const SourceView& view, const Translation& names, const Selection& selection,
                       const DtypeOptions& typing, const Format& format) {
  std::string what = "--quantize: ";
  for (const auto& [name, quantization] : kQuantizations)
    if (typing.quantize == quantization) what = "--quantize " + std::string(name) + ": ";
  if (!names.model.family)
    return unsupported(view.catalog.where() + ": " + what +
                       "the model belongs to no known family, so it is unknown which matrices to quantize " +
                       "(docs/families.md)");
  if (!names.renames() || names.to != Convention::kHf || format.holds == StateSupport::kAdam)
    return unsupported(what + "only Hugging Face names have names for scales; add --to hf or " + "--names hf");
  const Model& model = names.model;
  if (!model.is_described())
    return usage_error(view.catalog.where() + ": " + what +
                       "a config.json must record the quantization, but none was found; add one with --config");
  if (!has_matrices(*model.family, typing.quantize)) {
    const std::string why = typing.quantize == Quantization::kFp8Tensor ? " have all experts in one tensor"
                            : typing.quantize == Quantization::kMxfp4   ? " have no matrices in MXFP4"
                                                                        : " have no matrices in float8 blocks";
    return unsupported(what + "models of family " + model.family->name + why + other_quantizations(*model.family));
  }
  if (!model.config->quantization.empty())
    return unsupported(model.config->path + ": " + what + "the model is already quantized (" +
                       printable(model.config->quantization) + "); convert it with --dtype bfloat16 first");
  const auto& tensors = view.catalog.tensors();
  if (std::any_of(tensors.begin(), tensors.end(), [&](const Tensor& t) { return view.packed.contains(t.name); }))
    return unsupported(view.catalog.where() + ": " + what + "the model already has " + packed_text(names.packed) +
                       "; " + advice_to_unpack(names.packed));
  if (selection.merge_adapter) return usage_error(what + "merge the adapter first, then quantize the result");
  if (typing.dtype && byte_size(*typing.dtype) == 1)
    return usage_error(what + "--dtype applies to the other tensors and cannot be a float8 type");
  return {};
}

}  // namespace

Result<Requantization> requantize(SourceView& view, const Translation& names, const Selection& selection,
                                  const DtypeOptions& typing, const Format& format, ConversionNotes& notes) {
  if (typing.quantize != Quantization::kNone) {
    TRY(check_quantizes(view, names, selection, typing, format));
    Requantization out = TRY(typing.quantize == Quantization::kMxfp4 ? pack_mxfp4(view, names.model, typing, notes)
                                                                     : quantize_fp8(view, names.model, typing, notes));
    if (out.tensors.empty())
      return usage_error(view.catalog.where() + ": --quantize: no selected matrix can be quantized");
    return out;
  }
  Requantization out = TRY(apply_block_scales(view, names.float8, typing, notes));
  if (!out.stored) out = TRY(unpack_mxfp4(view, names.model, typing, notes));
  TRY(check_scales_are_applied(view, typing));
  return out;
}

}  // namespace reshard
