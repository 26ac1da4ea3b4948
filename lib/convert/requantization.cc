#include "lib/convert/requantization.h"

#include <string>
#include <string_view>
#include <unordered_map>

#include "lib/base/text.h"
#include "lib/convert/block_scales.h"
#include "lib/convert/fp8_blocks.h"
#include "lib/convert/mxfp4.h"
#include "lib/device/convert.h"
#include "lib/model/family.h"

namespace reshard {
namespace {

// Float8 elements are a model's weights only once they are multiplied by the scales that lie beside them, whatever
// those are called ("weight_scale", "weight_scale_inv", "qscale_weight"), and however many there are.
Status check_scales_are_applied(const SourceView& view, const Typing& typing) {
  if (!typing.dtype || byte_size(*typing.dtype) == 1) return {};
  const auto& tensors = view.catalog.tensors();
  std::unordered_map<std::string_view, std::size_t> scales;  // by module
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string_view name = tensors[i].name, module = module_of(name);
    if (name.substr(module.size()).find("scale") != std::string_view::npos && !view.applied.contains(i))
      scales.insert_or_assign(module, i);
  }
  for (std::size_t i = 0; i < tensors.size() && !scales.empty(); ++i) {
    const Tensor& t = tensors[i];
    if (byte_size(t.dtype) != 1 || !can_convert(t.dtype, *typing.dtype) || view.computed.contains(i)) continue;
    const std::string& native = view.native(t.name);
    if (any_glob_matches(typing.keep_dtype, native) || any_glob_matches(typing.keep_dtype, t.name)) continue;
    if (const auto found = scales.find(module_of(t.name)); found != scales.end())
      return unsupported(
          view.catalog.root + ": " + tensor_text(native) + " is " + std::string(info(t.dtype).torch_name) + " beside " +
          tensor_text(view.native(tensors[found->second].name)) + ": without its scale it would have other values as " +
          std::string(info(*typing.dtype).torch_name) +
          ", and how these are applied is not known (docs/families.md). Leave out --dtype to keep both");
  }
  return {};
}

}  // namespace

Result<Requantization> requantize(SourceView& view, const Translation& names, const Selection& selection,
                                  const Typing& typing, const Format& format, Notes& notes) {
  if (typing.quantize) return quantize_fp8_blocks(view, names, selection, typing, format, notes);
  Requantization out = TRY(apply_block_scales(view, names.float8, typing, notes));
  if (!out.stored) out = TRY(unpack_mxfp4(view, names.model, typing, notes));
  TRY(check_scales_are_applied(view, typing));
  return out;
}

void set_requantized(const Requantization& made, TensorSource& stored, ComputedSource& source) {
  for (const ComputedTensor& t : made.tensors)
    source.set(t.tensor, t.fill_of(stored, source.catalog().tensors()[t.tensor].dtype));
}

}  // namespace reshard
