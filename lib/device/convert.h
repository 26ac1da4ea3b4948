// SPDX-License-Identifier: Apache-2.0
// Element type conversion, with the results of torch's tensor.to(dtype) on the CPU.
//
// Narrowing rounds to nearest, ties to even. Values that are too large become infinity (float8_e4m3fn has none: 448, as
// in torch 2.15; older versions give a NaN). Denormals are kept. float64 is converted to the narrow types through
// float32, rounding twice, as torch does (c10::Half, c10::BFloat16 and the float8 types are constructed from floats).
//
// A NaN stays a NaN. Between float16, float32 and float64, and from bfloat16 to float16 and float64, its sign and the
// upper bits of its payload are kept and the quiet bit is set, as processors do. bfloat16 to float32 only appends 16
// zero bits. When converted to bfloat16 every NaN becomes 0x7FC0, as in c10::BFloat16; torch's vectorised loops write
// 0xFFFF instead, so in torch the bits of such a NaN depend on the processor, the source type and the element's
// position. The same holds for float16 to float32 in short tensors, where torch writes 0x7FFFFFFF. A NaN converted to
// float8 is 0x7F with its sign. Only NaNs can differ from torch.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "lib/layout/dtype.h"

namespace reshard {

// Returns whether the conversion is supported: any pair of float16, bfloat16, float32, float64, float8_e4m3fn and
// float8_e5m2, identity included.
bool can_convert(DType from, DType to);

// Converts `n` elements. Requires can_convert(from, to). The buffers need no alignment and must not overlap.
void convert(DType from, DType to, const std::byte* in, std::byte* out, Index n);

struct ConvertVariant {
  std::string_view name;  // "portable", "avx2", "avx512"
  void (*convert)(DType from, DType to, const std::byte* in, std::byte* out, Index n);
};

// Returns the implementations that this machine can run. The portable one is first and defines the results; convert()
// uses the last. For tests and benchmarks.
std::vector<ConvertVariant> convert_variants();

}  // namespace reshard
