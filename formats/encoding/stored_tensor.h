// SPDX-License-Identifier: Apache-2.0
// The location of a tensor in its file, as every reader of tensor files determines it.
#pragma once

#include <string>

#include "lib/checkpoint/catalog.h"

namespace reshard {

// A whole tensor in one fragment. The caller sets `extent.file`, the index into the catalog's files.
struct StoredTensor : Fragment {
  DType dtype = DType::kFloat32;

  const Dims& shape() const { return box.shape; }
};

// Returns "bfloat16 [128, 64]".
inline std::string type_text(DType dtype, const Dims& shape) {
  return std::string(info(dtype).torch_name) + " " + to_string(shape);
}
inline std::string type_text(const StoredTensor& stored) { return type_text(stored.dtype, stored.shape()); }

}  // namespace reshard
