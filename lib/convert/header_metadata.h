// SPDX-License-Identifier: Apache-2.0
// Copies __metadata__, a member of the headers of safetensors files. Most of it is a trainer's notes, but torchao
// describes its packed tensors there, which cannot be loaded without it
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

// A tensor of the output, and the source tensor that it is a copy of; null: it is made of others.
struct CopiedTensor {
  const TargetTensor* to = nullptr;
  const Tensor* from = nullptr;
};

struct HeaderMetadata {
  std::vector<std::pair<std::string, std::string>> entries;  // of the output's headers
  Index needed = 0;                                          // weights that cannot be loaded without the entries
};

// Returns the metadata of a copy: the descriptions of weights, under the weights' names in the output, and, if
// `is_exact` (all values are those of the source), the other entries. Fails with unsupported if the output changes
// names, dtypes or shapes of the tensors that store a described weight, and with corrupt if a listed weight is not
// described.
Result<HeaderMetadata> copied_metadata(const Catalog& source, const std::vector<CopiedTensor>& tensors, bool is_exact);

}  // namespace reshard
