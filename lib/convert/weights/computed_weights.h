// SPDX-License-Identifier: Apache-2.0
// Weights that are computed as they are read: matrices of another dtype than they are stored in, or smaller ones and
// their scales.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/convert/view/source_view.h"
#include "lib/source/computed_source.h"

namespace reshard {

// A tensor of the view that is computed from others.
struct ComputedTensor {
  std::size_t tensor = 0;
  // Returns an object that computes the weight in dtype `as` from the stored tensors.
  std::function<ComputedSource::Fill(TensorSource& stored, DType as)> fill_of;
};

struct Requantization {
  std::vector<ComputedTensor> tensors;  // empty: none
  std::unique_ptr<Catalog> stored;      // the view before, with entries for added tensors; null if nothing is computed
  Json config;                          // quantization_config of the output; null: none
  Index worker_bytes = 0;               // memory that each thread needs for it
};

// Returns a tensor computed from one with the fragments `of`; its own fragments are never read.
Tensor computed_tensor(std::string name, DType dtype, const Dims& shape, const FragmentList& of);
// Fails (unsupported) if `t`, a tensor of the view, is not floating-point.
Status check_floats(const SourceView& view, const Tensor& t);

// Sets the computed tensors of `source`. All arguments but `made` must outlive `source`.
void set_requantized(const Requantization& made, TensorSource& stored, ComputedSource& source);

}  // namespace reshard
