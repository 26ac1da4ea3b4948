// SPDX-License-Identifier: Apache-2.0
#include "lib/device/low_rank.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "lib/device/convert.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace reshard {
namespace {

// sum[j] = b[0] * a[0, j] + b[1] * a[1, j] + ...; the rows of `a` have `columns` elements.
void product_row(const float* b, const float* a, Index columns, Index rank, float* sum, Index from = 0) {
  for (Index j = from; j < columns; ++j) {
    float s = 0;
    for (Index k = 0; k < rank; ++k) s = std::fma(b[k], a[k * columns + j], s);
    sum[j] = s;
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void product_row_avx2(const float* b, const float* a, Index columns, Index rank,
                                                          float* sum) {
  Index j = 0;
  for (; j + 8 <= columns; j += 8) {
    __m256 s = _mm256_setzero_ps();
    for (Index k = 0; k < rank; ++k) s = _mm256_fmadd_ps(_mm256_set1_ps(b[k]), _mm256_loadu_ps(a + k * columns + j), s);
    _mm256_storeu_ps(sum + j, s);
  }
  product_row(b, a, columns, rank, sum, j);
}
#endif

}  // namespace

void add_low_rank(std::byte* weight, DType dtype, const float* b, const float* a, Index rows, Index columns, Index rank,
                  float scaling, bool rounds_product) {
  std::vector<float> sum(columns), base(sum.size());
  std::vector<std::byte> narrow(sum.size() * sizeof(float));
  const auto bytes = [](std::vector<float>& v) { return reinterpret_cast<std::byte*>(v.data()); };
#if defined(__x86_64__)
  static const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const auto multiply = [](const float* x, const float* y, Index n, Index r, float* out) {
    has_fma ? product_row_avx2(x, y, n, r, out) : product_row(x, y, n, r, out);
  };
#else
  const auto multiply = [](const float* x, const float* y, Index n, Index r, float* out) {
    product_row(x, y, n, r, out);
  };
#endif
  for (Index i = 0; i < rows; ++i) {
    std::byte* const row = weight + i * columns * byte_size(dtype);
    multiply(b + i * rank, a, columns, rank, sum.data());
    for (float& s : sum) s *= scaling;
    if (rounds_product && dtype != DType::kFloat32) {
      convert(DType::kFloat32, dtype, bytes(sum), narrow.data(), columns);
      convert(dtype, DType::kFloat32, narrow.data(), bytes(sum), columns);
    }
    convert(dtype, DType::kFloat32, row, bytes(base), columns);
    for (std::size_t j = 0; j < sum.size(); ++j) base[j] += sum[j];
    convert(DType::kFloat32, dtype, bytes(base), row, columns);
  }
}

}  // namespace reshard
