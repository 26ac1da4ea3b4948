// SPDX-License-Identifier: Apache-2.0
// Element type conversion on a GPU: the kernels' arithmetic, which also runs on a CPU (host_device.h). The results are
// those of convert.h; elements.h has the arithmetic of a single element.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "lib/device/cuda/float_instructions.h"
#include "lib/device/cuda/words.h"
#include "lib/device/elements.h"
#include "lib/layout/dtype.h"

namespace reshard {

// A range of elements as an unaligned head, vectors, and a tail.
struct Span {
  Index head = 0;
  Index vectors = 0;  // at most kMaxCount
  Index n = 0;        // total number of elements
};

struct ConvertJob {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  Span span;
};

template <class From, class To>
struct DTypeConversion {
  // The elements that a thread reads and writes at once: as many of the wider type as fit in 16 bytes, so that
  // neighbouring threads access adjacent memory.
  static constexpr int kVector = 16 / static_cast<int>(std::max(sizeof(From), sizeof(To)));
  static constexpr std::uint32_t kBatch = 4;  // vectors that a thread has in flight
  static constexpr int kIn = kVector * static_cast<int>(sizeof(From)), kOut = kVector * static_cast<int>(sizeof(To));

  union Input {
    Word<kIn> word;
    From element[kVector];
    Pair<From> pair[kVector / 2];
    RESHARD_HD Input() : word{} {}
  };
  union Output {
    Word<kOut> word;
    To element[kVector];
    Pair<To> pair[kVector / 2];
    RESHARD_HD Output() : word{} {}
  };

  RESHARD_HD static void convert_one(const ConvertJob& job, Index i) {
    To v;
    narrow(widen(load_any<From>(job.in + i * Index{sizeof(From)})), v);
    store_any(job.out + i * Index{sizeof(To)}, v);
  }

  // Converts one thread's part of a tile of kBatch * `threads` vectors.
  template <class Instructions = FloatInstructions>
  RESHARD_HD static void convert_vectors(const ConvertJob& job, std::uint32_t tile, std::uint32_t thread,
                                         std::uint32_t threads) {
    const std::byte* in = job.in + job.span.head * Index{sizeof(From)};
    std::byte* out = job.out + job.span.head * Index{sizeof(To)};
    const std::uint32_t first = tile * kBatch * threads + thread;
    Input from[kBatch];
    RESHARD_UNROLL
    for (std::uint32_t b = 0; b < kBatch; ++b)
      if (first + b * threads < job.span.vectors)
        from[b].word = load_aligned<Word<kIn>>(in + Index{first + b * threads} * kIn);
    std::uint32_t left = 0;  // bit mask of vectors that the instructions cannot convert
    RESHARD_UNROLL
    for (std::uint32_t b = 0; b < kBatch; ++b) {
      if (first + b * threads >= job.span.vectors) break;
      Output to;
      if constexpr (kHasInstructions<Instructions, From, To>) {
        if (!convert_by_instructions<Instructions, From, To, kVector / 2>(from[b].pair, to.pair)) {
          left |= 1u << b;
          continue;
        }
      } else {
        RESHARD_UNROLL
        for (int i = 0; i < kVector; ++i) narrow(widen(from[b].element[i]), to.element[i]);
      }
      store_aligned(out + Index{first + b * threads} * kOut, to.word);
    }
    if constexpr (kHasInstructions<Instructions, From, To>) {
      RESHARD_NO_UNROLL
      for (std::uint32_t b = 0; left >> b != 0; ++b) {
        const Index vector = job.span.head + Index{first + b * threads} * kVector;
        RESHARD_NO_UNROLL
        for (int i = 0; i < kVector && (left >> b & 1) != 0; ++i) convert_one(job, vector + i);
      }
    }
  }

  // Converts one worker's part of the elements outside the vectors, usually none or one.
  RESHARD_HD static void convert_ends(const ConvertJob& job, Index worker, Index workers) {
    RESHARD_NO_UNROLL
    for (Index i = worker; i < job.span.head; i += workers) convert_one(job, i);
    RESHARD_NO_UNROLL
    for (Index i = job.span.head + job.span.vectors * kVector + worker; i < job.span.n; i += workers)
      convert_one(job, i);
  }

  // Runs on the CPU. `n` must be at most kMaxCount.
  static ConvertJob make(const std::byte* in, std::byte* out, Index n) {
    Span span = {0, 0, n};
    while (span.head < std::min<Index>(n, kVector) && !is_aligned(out + span.head * Index{sizeof(To)}, kOut))
      ++span.head;
    if (is_aligned(in + span.head * Index{sizeof(From)}, kIn) && is_aligned(out + span.head * Index{sizeof(To)}, kOut))
      span.vectors = (n - span.head) / kVector;
    return {in, out, span};
  }
};

// Calls body(DTypeConversion<From, To>()) for two different types. Requires can_convert(from, to).
template <class Body>
void with_conversion(DType from, DType to, const Body& body) {
  const auto with = [](DType dtype, const auto& then) {
    switch (dtype) {
      case DType::kFloat8E4M3:
        return then(Float8E4M3{});
      case DType::kFloat8E5M2:
        return then(Float8E5M2{});
      case DType::kFloat16:
        return then(Float16{});
      case DType::kBFloat16:
        return then(BFloat16{});
      case DType::kFloat64:
        return then(double{});
      default:
        return then(float{});
    }
  };
  with(from, [&]<class From>(From) {
    with(to, [&]<class To>(To) {
      if constexpr (!std::is_same_v<From, To>) body(DTypeConversion<From, To>());
    });
  });
}

}  // namespace reshard
