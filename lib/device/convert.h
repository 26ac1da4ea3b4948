// Changing the element type, with the results of torch's tensor.to(dtype) on the CPU.
//
// Narrowing rounds to nearest, ties to even; what is too large becomes an infinity (float8_e4m3fn has none: 448, as in
// torch 2.15; older ones give a NaN), denormals are kept. float64 goes to the narrow types by way of float32, rounding
// twice, as torch does (c10::Half, c10::BFloat16 and the float8 types are made from floats).
//
// A NaN stays a NaN. Between float16, float32 and float64, and from bfloat16 to float16 and float64, the sign and the
// upper bits of its payload are kept and the quiet bit is set, as the processor's own instructions do. bfloat16 to
// float32 only adds 16 zero bits. On the way to bfloat16 every NaN becomes 0x7FC0, which is what c10::BFloat16 makes of
// it; torch's vectorised loops write 0xFFFF instead, so that with torch the bits of such a NaN depend on the processor,
// the source type and the element's place in the tensor. The same holds for float16 to float32 in short tensors, where
// torch writes 0x7FFFFFFF. A NaN that becomes a float8 is 0x7F, with its sign. Nothing but NaNs differs.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "lib/layout/dtype.h"

namespace reshard {

// True among float16, bfloat16, float32, float64, float8_e4m3fn and float8_e5m2, identity included.
bool can_convert(DType from, DType to);

// Converts `n` elements; can_convert(from, to) holds. The buffers need no alignment and do not overlap.
void convert(DType from, DType to, const std::byte* in, std::byte* out, Index n);

struct ConvertVariant {
  std::string_view name;  // "portable", "avx2", "avx512"
  void (*convert)(DType from, DType to, const std::byte* in, std::byte* out, Index n);
};

// What this machine can run, the portable one first: it is the definition, the last is what convert() uses. For tests
// and benchmarks.
std::vector<ConvertVariant> convert_variants();

}  // namespace reshard
