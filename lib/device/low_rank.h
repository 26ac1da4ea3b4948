// SPDX-License-Identifier: Apache-2.0
// Adds the product of two narrow matrices to a wide one, as PEFT merges a LoRA adapter on the CPU
// (peft/tuners/lora/layer.py).
#pragma once

#include <cstddef>

#include "lib/layout/dtype.h"

namespace reshard {

// Adds (b x a) * scaling to the `rows` x `columns` row-major elements of `dtype` at `weight`; b is [rows, rank], a is
// [rank, columns]. Products are summed in order with one rounding each, as in torch's matrix product. The result is
// rounded to `dtype` first if `rounds_product`, and then the sum. `dtype` must be convertible to float32.
void add_low_rank(std::byte* weight, DType dtype, const float* b, const float* a, Index rows, Index columns, Index rank,
                  float scaling, bool rounds_product);

}  // namespace reshard
