// Numeric health of a run on a GPU: the arithmetic of the kernels, which runs on a CPU as well (host_device.h). The
// result is that of scan_run() (health.h), whose idea it follows: bit patterns are counted and compared, and only the
// greatest magnitude becomes a number, at the end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "lib/device/cuda/words.h"
#include "lib/device/float_form.h"
#include "lib/device/health.h"

namespace reshard {

// What patterns mean.
enum class Patterns {
  kFloat,         // magnitudes are ordered; from `special` on they are not finite
  kUnsignedZero,  // the same, but all are finite, and the only NaN is the negative zero
  kExponent,      // powers of two; all ones are NaN, none is zero
  kSigned,
  kUnsigned,
};

struct HealthJob {
  const std::byte* data = nullptr;
  std::uint64_t special = 0;  // kFloat only
  Index head = 0;             // elements before the first vector of 16 bytes
  Index vectors = 0;
  Index n = 0;  // elements, at least one
};

// What workers find, made for being added up: all zero at first.
struct HealthSums {
  std::uint64_t zeros = 0;
  std::uint64_t not_finite = 0;
  std::uint64_t infs = 0;        // elements of the magnitude `special`
  std::uint64_t top = 0;         // the greatest finite magnitude; one more with kExponent, of which none is zero
  std::uint64_t difference = 0;  // bits in which an element differs from the first
  std::uint64_t earliest = 0;    // all bits of the number of the first that is not finite inverted; 0: there is none
  std::uint64_t first = 0;       // the bits of the first element; set apart

  RESHARD_HD void add(const HealthSums& other) {
    zeros += other.zeros;
    not_finite += other.not_finite;
    infs += other.infs;
    if (other.top > top) top = other.top;
    difference |= other.difference;
    if (other.earliest > earliest) earliest = other.earliest;
  }
};

template <class U, Patterns kPatterns>
struct HealthKernel {
  static constexpr int kVector = 16 / static_cast<int>(sizeof(U));
  static constexpr U kMask = static_cast<U>(U{static_cast<U>(~U{0})} >> 1);  // all but the sign
  static constexpr U kSign = static_cast<U>(~kMask);

  // What a thread finds, in as few bits as hold it: a thread sees less than 2^32 elements.
  struct Sums {
    std::uint32_t zeros = 0, not_finite = 0, infs = 0;
    U top = 0, difference = 0;
    std::uint64_t earliest = 0;
  };
  union Vector {
    Word<16> word;
    U element[kVector];
    RESHARD_HD Vector() : word{} {}
  };

  RESHARD_HD static void look(U x, U first, U special, Index number, Sums& sums) {
    U magnitude = x;
    bool finite = true;
    if constexpr (kPatterns == Patterns::kFloat) {
      magnitude = static_cast<U>(x & kMask);
      finite = magnitude < special;
      sums.infs += magnitude == special ? 1 : 0;
    } else if constexpr (kPatterns == Patterns::kUnsignedZero) {
      magnitude = static_cast<U>(x & kMask);
      finite = x != kSign;
    } else if constexpr (kPatterns == Patterns::kExponent) {
      magnitude = static_cast<U>(x + 1);
      finite = magnitude != 0;
    } else if constexpr (kPatterns == Patterns::kSigned) {
      magnitude = (x & kSign) != 0 ? static_cast<U>(U{0} - x) : x;
    }
    sums.difference = static_cast<U>(sums.difference | (x ^ first));
    if (finite) {
      sums.zeros += magnitude == 0 ? 1 : 0;
      sums.top = magnitude > sums.top ? magnitude : sums.top;
    } else {
      ++sums.not_finite;
      const auto early = ~static_cast<std::uint64_t>(number);
      sums.earliest = early > sums.earliest ? early : sums.earliest;
    }
  }

  // One worker's part.
  RESHARD_HD static HealthSums look_at(const HealthJob& job, Index worker, Index workers) {
    const auto special = static_cast<U>(job.special);
    const U first = load_any<U>(job.data);
    const Index begin = job.head * Index{sizeof(U)};
    Sums sums;
    for (Index v = worker; v < job.vectors; v += workers) {
      Vector x;
      x.word = load_aligned<Word<16>>(job.data + (begin + v * 16));
      RESHARD_UNROLL
      for (int i = 0; i < kVector; ++i) look(x.element[i], first, special, job.head + v * kVector + i, sums);
    }
    for (Index i = worker; i < job.head; i += workers)
      look(load_any<U>(job.data + i * Index{sizeof(U)}), first, special, i, sums);
    for (Index i = job.head + job.vectors * kVector + worker; i < job.n; i += workers)
      look(load_any<U>(job.data + i * Index{sizeof(U)}), first, special, i, sums);
    return {sums.zeros, sums.not_finite, sums.infs, sums.top, sums.difference, sums.earliest, first};
  }
};

// ---- on the CPU

// How a dtype's elements are looked at; a complex one is two numbers.
struct HealthForm {
  int bytes = 0;  // of a number
  Patterns patterns = Patterns::kUnsigned;
  FloatForm form;
};

inline HealthForm health_form(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUint8:
      return {1, Patterns::kUnsigned, {}};
    case DType::kInt8:
      return {1, Patterns::kSigned, {}};
    case DType::kUint16:
      return {2, Patterns::kUnsigned, {}};
    case DType::kInt16:
      return {2, Patterns::kSigned, {}};
    case DType::kUint32:
      return {4, Patterns::kUnsigned, {}};
    case DType::kInt32:
      return {4, Patterns::kSigned, {}};
    case DType::kUint64:
      return {8, Patterns::kUnsigned, {}};
    case DType::kInt64:
      return {8, Patterns::kSigned, {}};
    case DType::kFloat8E4M3:
      return {1, Patterns::kFloat, kE4M3};
    case DType::kFloat8E5M2:
      return {1, Patterns::kFloat, kE5M2};
    case DType::kFloat8E4M3Fnuz:
      return {1, Patterns::kUnsignedZero, kE4M3Fnuz};
    case DType::kFloat8E5M2Fnuz:
      return {1, Patterns::kUnsignedZero, kE5M2Fnuz};
    case DType::kFloat8E8M0:
      return {1, Patterns::kExponent, {}};
    case DType::kFloat16:
    case DType::kComplex32:
      return {2, Patterns::kFloat, kHalf};
    case DType::kBFloat16:
      return {2, Patterns::kFloat, kBrain};
    case DType::kFloat32:
    case DType::kComplex64:
      return {4, Patterns::kFloat, kSingle};
    case DType::kFloat64:
    case DType::kComplex128:
      break;
  }
  return {8, Patterns::kFloat, kDouble};
}

inline HealthJob make_health_job(const HealthForm& form, const std::byte* data, Index bytes) {
  HealthJob job;
  job.data = data;
  job.special = form.form.special;
  job.n = bytes / form.bytes;
  const Index in_vector = 16 / form.bytes;
  while (job.head < std::min(job.n, in_vector) && !is_aligned(data + job.head * form.bytes, 16)) ++job.head;
  if (is_aligned(data + job.head * form.bytes, 16)) job.vectors = (job.n - job.head) / in_vector;
  return job;
}

inline RunHealth finish_health(const HealthForm& form, const HealthSums& sums) {
  RunHealth out;
  const bool infinity = form.patterns == Patterns::kFloat && form.form.infinity;
  out.infs = infinity ? static_cast<Index>(sums.infs) : 0;
  out.nans = static_cast<Index>(sums.not_finite) - out.infs;
  out.zeros = static_cast<Index>(sums.zeros);
  out.first = sums.first;
  out.constant = sums.difference == 0;
  if (sums.earliest != 0) out.first_not_finite = static_cast<Index>(~sums.earliest);
  switch (form.patterns) {
    case Patterns::kFloat:
    case Patterns::kUnsignedZero:
      out.absmax = value_of(form.form, sums.top);
      break;
    case Patterns::kExponent:
      out.absmax = sums.top == 0 ? 0 : std::ldexp(1.0, static_cast<int>(sums.top) - 128);
      break;
    case Patterns::kSigned:
    case Patterns::kUnsigned:
      out.absmax = static_cast<double>(sums.top);
  }
  return out;
}

// Calls body(HealthKernel<U, kPatterns>()) with the kernel of a form.
template <class Body>
auto with_health_kernel(const HealthForm& form, const Body& body) {
  const auto of_width = [&](auto u) {
    using U = decltype(u);
    if (form.patterns == Patterns::kFloat) return body(HealthKernel<U, Patterns::kFloat>());
    if (form.patterns == Patterns::kSigned) return body(HealthKernel<U, Patterns::kSigned>());
    return body(HealthKernel<U, Patterns::kUnsigned>());
  };
  if (form.patterns == Patterns::kUnsignedZero) return body(HealthKernel<std::uint8_t, Patterns::kUnsignedZero>());
  if (form.patterns == Patterns::kExponent) return body(HealthKernel<std::uint8_t, Patterns::kExponent>());
  if (form.bytes == 1) return of_width(std::uint8_t{});
  if (form.bytes == 2) return of_width(std::uint16_t{});
  if (form.bytes == 4) return of_width(std::uint32_t{});
  return of_width(std::uint64_t{});
}

}  // namespace reshard
