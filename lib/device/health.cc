// SPDX-License-Identifier: Apache-2.0
#include "lib/device/health.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace reshard {
namespace {

// A floating-point format with one sign bit, whose magnitudes are ordered like their bits.
struct FloatForm {
  int bits = 0;
  int mantissa = 0;           // bits
  int bias = 0;               // of the exponent
  std::uint64_t special = 0;  // smallest magnitude that is not finite
  bool infinity = true;       // whether that is infinity; otherwise it and all larger ones are NaN

  constexpr std::uint64_t magnitude_mask() const { return (std::uint64_t{1} << (bits - 1)) - 1; }
  // Returns the index of the counter for a magnitude's exponent.
  constexpr std::size_t exponent_at(std::uint64_t magnitude) const {
    const int exponent = static_cast<int>((magnitude & magnitude_mask()) >> mantissa) - bias;
    return static_cast<std::size_t>(std::clamp(exponent - Exponents::kLeast, 0, Exponents::kCount - 1));
  }
};
constexpr FloatForm kDouble = {64, 52, 1023, 0x7ff0000000000000, true};
constexpr FloatForm kSingle = {32, 23, 127, 0x7f800000, true};
constexpr FloatForm kHalf = {16, 10, 15, 0x7c00, true};
constexpr FloatForm kBrain = {16, 7, 127, 0x7f80, true};
constexpr FloatForm kE4M3 = {8, 3, 7, 0x7f, false};
constexpr FloatForm kE5M2 = {8, 2, 15, 0x7c, true};
// The single NaN has the pattern of a negative zero; every magnitude is finite.
constexpr FloatForm kE4M3Fnuz = {8, 3, 8, 0x80, false};
constexpr FloatForm kE5M2Fnuz = {8, 2, 16, 0x80, false};
constexpr FloatForm kE8M0 = {9, 0, 127, 0xff, false};  // eight bits without a sign

// Calls use.template operator()<U, form>() for a floating-point dtype whose bits are of type U; does nothing for
// others.
template <class Use>
void with_form(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::kFloat8E4M3:
      return use.template operator()<std::uint8_t, kE4M3>();
    case DType::kFloat8E5M2:
      return use.template operator()<std::uint8_t, kE5M2>();
    case DType::kFloat8E4M3Fnuz:
      return use.template operator()<std::uint8_t, kE4M3Fnuz>();
    case DType::kFloat8E5M2Fnuz:
      return use.template operator()<std::uint8_t, kE5M2Fnuz>();
    case DType::kFloat8E8M0:
      return use.template operator()<std::uint8_t, kE8M0>();
    case DType::kBFloat16:
      return use.template operator()<std::uint16_t, kBrain>();
    case DType::kFloat16:
    case DType::kComplex32:
      return use.template operator()<std::uint16_t, kHalf>();
    case DType::kFloat32:
    case DType::kComplex64:
      return use.template operator()<std::uint32_t, kSingle>();
    case DType::kFloat64:
    case DType::kComplex128:
      return use.template operator()<std::uint64_t, kDouble>();
    default:
      return;
  }
}

// Returns a finite magnitude as a number.
double value_of(const FloatForm& form, std::uint64_t magnitude) {
  const std::uint64_t exponent = magnitude >> form.mantissa;
  const std::uint64_t fraction = magnitude & ((std::uint64_t{1} << form.mantissa) - 1);
  if (exponent == 0) return std::ldexp(static_cast<double>(fraction), 1 - form.bias - form.mantissa);
  const std::uint64_t rebias = kDouble.bias - form.bias;
  return std::bit_cast<double>(((exponent + rebias) << kDouble.mantissa) | fraction
                                                                               << (kDouble.mantissa - form.mantissa));
}

// Always inlined into functions compiled for other instruction sets, so that each gets its own vectorised loop.
#define RESHARD_INLINE inline __attribute__((always_inline))

// Lanes between two additions to the full counters: a 16-bit lane must not count beyond 65,535.
constexpr Index kBlock = Index{1} << 14;
// Rows between two additions to a tensor's rows.
constexpr std::size_t kRowBatch = 1024;
// The shortest row that a slab may split (256 KiB of the widest elements).
constexpr Index kLongRow = Index{1} << 14;

template <class T>
RESHARD_INLINE T load(const std::byte* at) {
  T v;
  std::memcpy(&v, at, sizeof(T));
  return v;
}

// ---- One loop for runs in which every element is finite

struct LaneSums {
  Index zeros = 0;
  std::uint64_t top = 0;         // the greatest magnitude
  std::uint64_t difference = 0;  // bits that differ from `first` in some element
};

// Adds `n` elements of type U.
template <class U>
RESHARD_INLINE void sum_lanes(const std::byte* in, Index n, std::uint64_t magnitude_mask, std::uint64_t first,
                              LaneSums& sums) {
  using Signed = std::make_signed_t<U>;  // SSE2 only compares signed numbers, and magnitudes have the top bit free
  const auto mask = static_cast<U>(magnitude_mask), value = static_cast<U>(first);
  Signed top = 0;
  U difference = 0;
  for (Index begin = 0; begin < n; begin += kBlock) {
    const std::byte* block = in + begin * Index{sizeof(U)};
    const Index lanes = std::min(kBlock, n - begin);
    U zeros = 0;
    for (Index i = 0; i < lanes; ++i) {
      const U x = load<U>(block + i * Index{sizeof(U)});
      const auto magnitude = static_cast<Signed>(x & mask);
      zeros = static_cast<U>(zeros + (magnitude == 0));
      top = std::max(top, magnitude);
      difference = static_cast<U>(difference | (x ^ value));
    }
    sums.zeros += zeros;
  }
  sums.top = std::max<std::uint64_t>(sums.top, top);
  sums.difference |= difference;
}

// For elements of one byte, two per lane: counters of 8 bits would overflow too soon.
template <>
RESHARD_INLINE void sum_lanes<std::uint8_t>(const std::byte* in, Index n, std::uint64_t magnitude_mask,
                                            std::uint64_t first, LaneSums& sums) {
  using U = std::uint16_t;
  const auto mask = static_cast<std::int16_t>(magnitude_mask);
  const auto value = static_cast<U>(first | first << 8);
  std::int16_t top = 0;
  U difference = 0;
  for (Index begin = 0; begin < n / 2; begin += kBlock) {
    const std::byte* block = in + begin * 2;
    const Index lanes = std::min(kBlock, n / 2 - begin);
    U zeros = 0;
    for (Index i = 0; i < lanes; ++i) {
      const U x = load<U>(block + i * 2);
      const auto low = static_cast<std::int16_t>(x & mask), high = static_cast<std::int16_t>((x >> 8) & mask);
      zeros = static_cast<U>(zeros + (low == 0) + (high == 0));
      top = std::max(top, std::max(low, high));
      difference = static_cast<U>(difference | (x ^ value));
    }
    sums.zeros += zeros;
  }
  if (n % 2 != 0) {
    const auto x = std::to_integer<std::int16_t>(in[n - 1]);
    sums.zeros += (x & mask) == 0;
    top = std::max(top, static_cast<std::int16_t>(x & mask));
    difference = static_cast<U>(difference | (static_cast<U>(x) ^ static_cast<U>(first)));
  }
  sums.top = std::max<std::uint64_t>(sums.top, top);
  sums.difference |= difference;
}

using SumLanes = void (*)(const std::byte* in, Index n, std::uint64_t magnitude_mask, std::uint64_t first,
                          LaneSums& sums);
// For elements of 1, 2, 4 and 8 bytes.
using Kernels = std::array<SumLanes, 4>;

template <class U>
void sum_portable(const std::byte* in, Index n, std::uint64_t mask, std::uint64_t first, LaneSums& sums) {
  sum_lanes<U>(in, n, mask, first, sums);
}

#if defined(__x86_64__)
#define RESHARD_AVX2 __attribute__((target("avx2")))
#define RESHARD_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2")))

template <class U>
RESHARD_AVX2 void sum_avx2(const std::byte* in, Index n, std::uint64_t mask, std::uint64_t first, LaneSums& sums) {
  sum_lanes<U>(in, n, mask, first, sums);
}
template <class U>
RESHARD_AVX512 void sum_avx512(const std::byte* in, Index n, std::uint64_t mask, std::uint64_t first, LaneSums& sums) {
  sum_lanes<U>(in, n, mask, first, sums);
}
#endif

// ---- Runs with special values

template <class U>
void count_special(const FloatForm& form, Bytes run, RunHealth& out) {
  const auto mask = static_cast<U>(form.magnitude_mask()), special = static_cast<U>(form.special);
  const Index n = run.size() / sizeof(U);
  const auto magnitude = [&](Index i) { return static_cast<U>(load<U>(run.data() + i * Index{sizeof(U)}) & mask); };
  U top = 0;
  Index infs = 0, above = 0;
  for (Index i = 0; i < n; ++i) {
    const U m = magnitude(i);
    infs += m == special;
    above += m > special;
    top = std::max(top, m < special ? m : U{0});
  }
  out.infs = form.infinity ? infs : 0;
  out.nans = form.infinity ? above : above + infs;
  out.absmax = value_of(form, top);
  out.first_not_finite = 0;
  while (magnitude(out.first_not_finite) < special) ++out.first_not_finite;
}

template <class U>
RunHealth scan_floats(const FloatForm& form, SumLanes kernel, Bytes run) {
  RunHealth out;
  out.first = load<U>(run.data());
  LaneSums sums;
  kernel(run.data(), run.size() / sizeof(U), form.magnitude_mask(), out.first, sums);
  out.zeros = sums.zeros;
  out.constant = sums.difference == 0;
  if (sums.top < form.special)
    out.absmax = value_of(form, sums.top);
  else
    count_special<U>(form, run, out);
  return out;
}

template <class T>
RunHealth scan_integers(Bytes run) {
  const Index n = run.size() / sizeof(T);
  T low = std::numeric_limits<T>::max(), high = std::numeric_limits<T>::lowest();
  RunHealth out;
  for (Index i = 0; i < n; ++i) {
    const T v = load<T>(run.data() + i * Index{sizeof(T)});
    out.zeros += v == 0;
    low = std::min(low, v);
    high = std::max(high, v);
  }
  out.absmax = std::max(std::abs(static_cast<double>(low)), std::abs(static_cast<double>(high)));
  out.first = load<std::make_unsigned_t<T>>(run.data());
  out.constant = low == high;
  return out;
}

// Scans elements of one byte; `value` maps a bit pattern to its number.
template <class Value>
RunHealth scan_patterns(Bytes run, Value value) {
  std::array<Index, 256> counts{};
  for (const std::byte b : run) ++counts[std::to_integer<std::size_t>(b)];
  RunHealth out;
  out.first = std::to_integer<std::uint64_t>(run.front());
  out.constant = counts[out.first] == std::ssize(run);
  for (std::size_t pattern = 0; pattern < counts.size(); ++pattern) {
    if (counts[pattern] == 0) continue;
    const double v = value(static_cast<std::uint8_t>(pattern));
    if (std::isnan(v)) {
      out.nans += counts[pattern];
      const auto at = std::find(run.begin(), run.end(), static_cast<std::byte>(pattern));
      out.first_not_finite = at - run.begin();  // no such type has two NaNs
    } else {
      if (v == 0) out.zeros = counts[pattern];
      out.absmax = std::max(out.absmax, std::abs(v));
    }
  }
  return out;
}

RunHealth scan_unsigned_zero(const FloatForm& form, Bytes run) {
  return scan_patterns(run, [&](std::uint8_t pattern) {
    return pattern == 0x80 ? std::numeric_limits<double>::quiet_NaN() : value_of(form, pattern & form.magnitude_mask());
  });
}

// float8_e8m0: powers of two from 2^-127, the scales of blocks.
RunHealth scan_exponents(Bytes run) {
  return scan_patterns(run, [](std::uint8_t pattern) {
    return pattern == 0xff ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, pattern - 127);
  });
}

RunHealth scan_by(const Kernels& kernels, DType dtype, Bytes run) {
  if (run.empty()) return {};
  switch (dtype) {
    case DType::kBool:
    case DType::kFloat4E2M1x2:
    case DType::kUint8:
      return scan_integers<std::uint8_t>(run);
    case DType::kInt8:
      return scan_integers<std::int8_t>(run);
    case DType::kUint16:
      return scan_integers<std::uint16_t>(run);
    case DType::kInt16:
      return scan_integers<std::int16_t>(run);
    case DType::kUint32:
      return scan_integers<std::uint32_t>(run);
    case DType::kInt32:
      return scan_integers<std::int32_t>(run);
    case DType::kUint64:
      return scan_integers<std::uint64_t>(run);
    case DType::kInt64:
      return scan_integers<std::int64_t>(run);
    case DType::kFloat8E4M3:
      return scan_floats<std::uint8_t>(kE4M3, kernels[0], run);
    case DType::kFloat8E5M2:
      return scan_floats<std::uint8_t>(kE5M2, kernels[0], run);
    case DType::kFloat8E4M3Fnuz:
      return scan_unsigned_zero(kE4M3Fnuz, run);
    case DType::kFloat8E5M2Fnuz:
      return scan_unsigned_zero(kE5M2Fnuz, run);
    case DType::kFloat8E8M0:
      return scan_exponents(run);
    case DType::kBFloat16:
      return scan_floats<std::uint16_t>(kBrain, kernels[1], run);
    case DType::kFloat16:
    case DType::kComplex32:
      return scan_floats<std::uint16_t>(kHalf, kernels[1], run);
    case DType::kFloat32:
    case DType::kComplex64:
      return scan_floats<std::uint32_t>(kSingle, kernels[2], run);
    case DType::kFloat64:
    case DType::kComplex128:
      break;
  }
  return scan_floats<std::uint64_t>(kDouble, kernels[3], run);
}

RunHealth scan_portable(DType dtype, Bytes run) {
  static constexpr Kernels kKernels = {sum_portable<std::uint8_t>, sum_portable<std::uint16_t>,
                                       sum_portable<std::uint32_t>, sum_portable<std::uint64_t>};
  return scan_by(kKernels, dtype, run);
}

#if defined(__x86_64__)
RunHealth scan_avx2(DType dtype, Bytes run) {
  static constexpr Kernels kKernels = {sum_avx2<std::uint8_t>, sum_avx2<std::uint16_t>, sum_avx2<std::uint32_t>,
                                       sum_avx2<std::uint64_t>};
  return scan_by(kKernels, dtype, run);
}
RunHealth scan_avx512(DType dtype, Bytes run) {
  static constexpr Kernels kKernels = {sum_avx512<std::uint8_t>, sum_avx512<std::uint16_t>, sum_avx512<std::uint32_t>,
                                       sum_avx512<std::uint64_t>};
  return scan_by(kKernels, dtype, run);
}
#endif

// ---- Exponents

using ExponentCounters = std::array<std::uint32_t, Exponents::kCount>;

template <class U, FloatForm form>
ExponentCounters count_fields(Bytes run) {
  // Neighbours often have the same exponent, so each has its own counters and none waits for the other.
  std::array<ExponentCounters, 4> counters{};
  const Index n = run.size() / sizeof(U);
  const auto count = [&](Index i, std::size_t lane) {
    ++counters[lane][form.exponent_at(load<U>(run.data() + i * Index{sizeof(U)}))];
  };
  Index i = 0;
  for (; i + 4 <= n; i += 4)
    for (std::size_t lane = 0; lane < 4; ++lane) count(i + static_cast<Index>(lane), lane);
  for (; i < n; ++i) count(i, 0);
  for (std::size_t lane = 1; lane < 4; ++lane)
    for (std::size_t e = 0; e < counters[0].size(); ++e) counters[0][e] += counters[lane][e];
  return counters[0];
}

// Counts the numbers of a run below 4 GiB by their exponent bits. Zeros, subnormals and special values are counted as
// their bits say. All counts are 0 for integers.
ExponentCounters count_exponent_bits(DType dtype, Bytes run) {
  ExponentCounters out{};
  with_form(dtype, [&]<class U, FloatForm form>() { out = count_fields<U, form>(run); });
  return out;
}

// Returns how many numbers an element consists of.
Index parts_of(DType dtype) {
  return dtype == DType::kComplex32 || dtype == DType::kComplex64 || dtype == DType::kComplex128 ? 2 : 1;
}

// Appends `next`, which begins with element number `at`, to `run`.
void append(RunHealth& run, const RunHealth& next, Index at) {
  if (run.first_not_finite < 0 && next.first_not_finite >= 0) run.first_not_finite = at + next.first_not_finite;
  if (at == 0) run.first = next.first;
  run.constant = run.constant && next.constant && run.first == next.first;
  run.nans += next.nans;
  run.infs += next.infs;
  run.zeros += next.zeros;
  run.absmax = std::max(run.absmax, next.absmax);
}

Index row_elements_of(const Dims& shape) {
  if (shape.rank() < 2 || shape[0] < 1 || shape[0] > HealthScan::kMaxRows) return 0;
  const Index n = volume(shape) / shape[0];
  return n >= HealthScan::kMinRowElements ? n : 0;
}

}  // namespace

std::vector<HealthVariant> health_variants() {
  std::vector<HealthVariant> variants = {{"portable", scan_portable}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) variants.push_back({"avx2", scan_avx2});
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    variants.push_back({"avx512", scan_avx512});
#endif
  return variants;
}

RunHealth scan_run(DType dtype, Bytes run) {
  static const auto best = health_variants().back().scan;
  return best(dtype, run);
}

void RowSet::add(Index row) {
  ++count;
  if (!ranges.empty() && ranges.back().end == row)
    ++ranges.back().end;
  else if (ranges.size() < kMaxRanges)
    ranges.push_back({row, row + 1});
}

HealthScan::HealthScan(DType dtype, const Dims& shape, Index split, bool exponents)
    : dtype_(dtype), shape_(shape), split_(split), row_elements_(row_elements_of(shape)), exponents_(exponents) {}

Index HealthScan::row_memory(const Dims& shape) {
  const Index elements = row_elements_of(shape);
  if (elements == 0) return 0;
  const Index batch = kRowBatch * sizeof(RowPart);
  return batch + ceil_div(shape[0], 4) + (elements >= kLongRow ? ceil_div(shape[0], 8) + 8 * shape[0] : 0);
}

void HealthScan::add(const Box& box, Bytes elements) {
  if (box.empty()) return;
  if (exponents_) add_exponents(elements);
  add_total(row_elements_ == 0 ? scan_run(dtype_, elements) : scan_rows(box, elements), volume(box) * parts_of(dtype_),
            box);
}

RunHealth HealthScan::scan_rows(const Box& box, Bytes elements) {
  const Index rows = box.shape[0], in_row = volume(box) / rows;
  const std::size_t row_bytes = in_row * byte_size(dtype_);
  const Index parts_in_row = in_row * parts_of(dtype_);
  RunHealth all;
  std::vector<RowPart> parts;
  parts.reserve(std::min<std::size_t>(kRowBatch, rows));
  for (Index r = 0; r < rows; ++r) {
    const RunHealth row = scan_run(dtype_, elements.subspan(static_cast<std::size_t>(r) * row_bytes, row_bytes));
    append(all, row, r * parts_in_row);
    parts.push_back({row.first, row.zeros == parts_in_row, row.constant});
    if (parts.size() < kRowBatch && r + 1 < rows) continue;
    add_rows(box.begin(0) + r + 1 - std::ssize(parts), parts, in_row == row_elements_);
    parts.clear();
  }
  return all;
}

void HealthScan::add_rows(Index first_row, const std::vector<RowPart>& parts, bool whole_rows) {
  const std::lock_guard lock(mutex_);
  const std::size_t rows = shape_[0];
  not_zero_.resize(rows);
  not_constant_.resize(rows);
  if (!whole_rows) {
    values_.resize(rows);
    has_value_.resize(rows);
  }
  std::size_t row = first_row;
  for (const RowPart& part : parts) {
    if (!part.zero) not_zero_[row] = true;
    if (!part.constant) not_constant_[row] = true;
    if (!whole_rows) {
      if (has_value_[row] && values_[row] != part.value) not_constant_[row] = true;
      values_[row] = part.value;
      has_value_[row] = true;
    }
    ++row;
  }
}

void HealthScan::add_exponents(Bytes elements) {
  const ExponentCounters counters = count_exponent_bits(dtype_, elements);
  const std::lock_guard lock(mutex_);
  by_exponent_.resize(counters.size());
  for (std::size_t e = 0; e < counters.size(); ++e) by_exponent_[e] += counters[e];
}

void HealthScan::add_total(const RunHealth& run, Index elements, const Box& box) {
  const std::lock_guard lock(mutex_);
  if (total_.elements == 0) value_ = run.first;
  total_.constant = total_.constant && run.constant && run.first == value_;
  total_.elements += elements;
  total_.nans += run.nans;
  total_.infs += run.infs;
  total_.zeros += run.zeros;
  total_.absmax = std::max(total_.absmax, run.absmax);
  if (run.first_not_finite >= 0) {
    const Index row = box.rank() == 0 ? 0 : box.begin(0) + run.first_not_finite / (elements / box.shape[0]);
    if (total_.first_not_finite_row < 0 || row < total_.first_not_finite_row) total_.first_not_finite_row = row;
  }
  if (total_.elements != volume(shape_) * parts_of(dtype_)) return;
  if (row_elements_ > 0) close_rows();
  if (exponents_) close_exponents();
}

// Removes zeros, NaNs and infinities from the counts of the exponents whose bits they have.
void HealthScan::close_exponents() {
  with_form(dtype_, [&]<class U, FloatForm form>() {
    by_exponent_[form.exponent_at(0)] -= total_.zeros;
    by_exponent_[form.exponent_at(form.special)] -= total_.nans + total_.infs;
  });
  const auto is_counted = [](Index n) { return n > 0; };
  const auto begin = std::find_if(by_exponent_.begin(), by_exponent_.end(), is_counted);
  const auto end = std::find_if(by_exponent_.rbegin(), by_exponent_.rend(), is_counted).base();
  if (begin < end)
    total_.exponents = {Exponents::kLeast + static_cast<int>(begin - by_exponent_.begin()), {begin, end}};
  by_exponent_ = {};
}

void HealthScan::close_rows() {
  for (Index row = 0; row < shape_[0]; ++row) {
    RowHealth& part = split_ >= 0 && row >= split_ ? total_.tail : total_.rows;
    const std::size_t i = row;
    if (!not_zero_[i])
      part.zero.add(row);
    else if (!not_constant_[i])
      part.constant.add(row);
  }
  total_.rows_seen = true;
  not_zero_ = {};
  not_constant_ = {};
  values_ = {};
  has_value_ = {};
}

TensorHealth HealthScan::health() const {
  const std::lock_guard lock(mutex_);
  return total_;
}

}  // namespace reshard
