// Adding a product of two narrow matrices to a wide one, as PEFT merges a LoRA adapter on the CPU
// (peft/tuners/lora/layer.py).
#pragma once

#include <cstddef>
#include <span>

#include "lib/layout/dtype.h"

namespace reshard {

// Adds (b x a) * scaling to the `rows` x `columns` elements at `weight`, of `dtype`, row-major: b is [rows, rank], a
// [rank, columns]. The products are summed in order with one rounding each, as torch's matrix product does; what is
// added is rounded to each of `rounded` in turn (what the adapter is kept in), the sum to `dtype`. All of them can be
// converted to float32.
void add_low_rank(std::byte* weight, DType dtype, const float* b, const float* a, Index rows, Index columns, Index rank,
                  float scaling, std::span<const DType> rounded);

}  // namespace reshard
