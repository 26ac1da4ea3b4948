// Where the elements of one stored tensor lie in its file: what every reader of files of tensors finds out.
#pragma once

#include "lib/checkpoint/catalog.h"

namespace reshard {

// A whole tensor in one fragment; which of a catalog's files its extent is in, is for the caller to say.
struct StoredTensor : Fragment {
  DType dtype = DType::kFloat32;

  const Dims& shape() const { return box.shape; }
};

}  // namespace reshard
