// SPDX-License-Identifier: Apache-2.0
// What the headers of safetensors files say in __metadata__, in a copy. Most of it is a trainer's notes. torchao stores
// there what its packed tensors are, and without it nothing can load them
// (prototype/safetensors/safetensors_support.py):
//
//   "tensor_names": "[\"a.weight\", \"a.bias\"]"                       JSON: the tensors of the model
//   "a.weight": "{\"_type\": \"Int4Tensor\", \"_data\": {\"block_size\": ...}, ...}"  stored as a._weight_qdata, ...
//   "a.bias": "{\"_type\": \"Tensor\"}"
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lib/base/result.h"
#include "lib/checkpoint/format.h"

namespace reshard {

// A tensor of the output and the one of the source that it is; null: it is made of others.
struct CopiedTensor {
  const TargetTensor* to = nullptr;
  const Tensor* from = nullptr;
};

struct HeaderMetadata {
  std::vector<std::pair<std::string, std::string>> entries;  // of the output's headers
  Index needed = 0;                                          // weights that cannot be loaded without the entries
};

// Returns the metadata of a copy: descriptions of weights under the names that these have in the output, and the other
// entries if `is_exact`, that is, if no tensor has other values than in the source. Unsupported if a described weight
// is stored in tensors whose names, dtypes or shapes the output changes. Corrupt if a listed weight is not described.
Result<HeaderMetadata> copied_metadata(const Catalog& source, const std::vector<CopiedTensor>& tensors, bool is_exact);

}  // namespace reshard
