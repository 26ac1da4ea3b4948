// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/computed_weights.h"

#include <utility>

#include "lib/base/text.h"
#include "lib/device/convert.h"

namespace reshard {

Tensor computed_tensor(std::string name, DType dtype, const Dims& shape, const FragmentList& of) {
  Tensor out;
  out.name = std::move(name);
  out.dtype = dtype;
  out.shape = shape;
  out.fragments = FragmentList(shape.rank());
  if (!of.empty()) out.fragments.add(whole(shape), of.extent(0));
  return out;
}

Status check_floats(const SourceView& view, const Tensor& t) {
  if (byte_size(t.dtype) >= 2 && can_convert(t.dtype, DType::kFloat32)) return {};
  return unsupported(view.catalog.where() + ": " + tensor_text(view.native(t.name)) + " is " +
                     std::string(info(t.dtype).torch_name) + ": --quantize supports only floating-point matrices");
}

void set_requantized(const Requantization& made, TensorSource& stored, ComputedSource& source) {
  for (const ComputedTensor& t : made.tensors)
    source.set(t.tensor, t.fill_of(stored, source.catalog().tensors()[t.tensor].dtype));
}

}  // namespace reshard
