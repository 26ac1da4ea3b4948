// Changing the element type on a GPU: the arithmetic of the kernels, which runs on a CPU as well (host_device.h). The
// results are those of convert.h, whose arithmetic (elements.h) it uses.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "lib/device/cuda/float_instructions.h"
#include "lib/device/cuda/words.h"
#include "lib/device/elements.h"
#include "lib/layout/dtype.h"

namespace reshard {

// Elements as a head that is not aligned, vectors, and a tail.
struct Span {
  Index head = 0;
  Index vectors = 0;  // kMaxCount at most
  Index n = 0;        // of all elements
};

struct ConvertJob {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  Span span;
};

template <class From, class To>
struct Conversion {
  // Elements that a thread reads and writes at once: as many as 16 bytes hold of the wider type, so that what
  // neighbouring threads read and write lies side by side.
  static constexpr int kVector = 16 / static_cast<int>(std::max(sizeof(From), sizeof(To)));
  static constexpr std::uint32_t kBatch = 4;  // vectors under way at once
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

  // One thread's part of a tile of kBatch * `threads` vectors.
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
    std::uint32_t left = 0;  // vectors that the instructions do not do, a bit for each
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

  // One worker's part of what is not in vectors, mostly nothing or one element.
  RESHARD_HD static void convert_ends(const ConvertJob& job, Index worker, Index workers) {
    RESHARD_NO_UNROLL
    for (Index i = worker; i < job.span.head; i += workers) convert_one(job, i);
    RESHARD_NO_UNROLL
    for (Index i = job.span.head + job.span.vectors * kVector + worker; i < job.span.n; i += workers)
      convert_one(job, i);
  }

  // On the CPU. `n` is kMaxCount at most.
  static ConvertJob make(const std::byte* in, std::byte* out, Index n) {
    Span span = {0, 0, n};
    while (span.head < std::min<Index>(n, kVector) && !is_aligned(out + span.head * Index{sizeof(To)}, kOut))
      ++span.head;
    if (is_aligned(in + span.head * Index{sizeof(From)}, kIn) && is_aligned(out + span.head * Index{sizeof(To)}, kOut))
      span.vectors = (n - span.head) / kVector;
    return {in, out, span};
  }
};

// Calls body(Conversion<From, To>()) for two types that are not the same; can_convert(from, to) holds.
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
      if constexpr (!std::is_same_v<From, To>) body(Conversion<From, To>());
    });
  });
}

}  // namespace reshard
