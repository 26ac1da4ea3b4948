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

// A tensor of the view that is computed of others.
struct ComputedTensor {
  std::size_t tensor = 0;
  // What fills it in this dtype, of the tensors as they are stored.
  std::function<ComputedSource::Fill(TensorSource& stored, DType as)> fill_of;
};

struct Requantization {
  std::vector<ComputedTensor> tensors;  // empty: none
  std::unique_ptr<Catalog> stored;      // the view as it was, with places for tensors it gets; null where none are made
  Json config;                          // quantization_config of what is written; null: none
  Index worker_bytes = 0;               // that each worker takes for it
};

// For those who make one: a tensor that is computed of one with the fragments `of`, which are never read.
Tensor computed_tensor(std::string name, DType dtype, const Dims& shape, const FragmentList& of);
// And that it is made of floating-point numbers; `t` is of the view.
Status check_floats(const SourceView& view, const Tensor& t);

// Makes those tensors of `source` what they are to be. Refers to all but `made`.
void set_requantized(const Requantization& made, TensorSource& stored, ComputedSource& source);

}  // namespace reshard
