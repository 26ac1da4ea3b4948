// The digest on a GPU: the arithmetic of the kernel, which runs on a CPU as well (host_device.h). The result is that of
// digest.h to the bit: sums modulo 2^32 do not care for order.
//
// The part of a block of 1024 lanes that lies in one run is an item. A group of up to 32 neighbouring threads takes an
// item, reading it in vectors of 16 bytes, and multiplies by the block's key once for all the vectors of a thread.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>

#include "lib/device/cuda/copy_kernels.h"
#include "lib/device/digest.h"

namespace reshard {

// All weights, word by word. On a GPU each block of threads keeps them in shared memory.
struct alignas(16) DigestWeights {
  std::int16_t of[kDigestWords][kDigestBlock];
};
constexpr DigestWeights make_digest_weights() {
  DigestWeights w{};
  for (int k = 0; k < kDigestWords; ++k)
    for (Index lane = 0; lane < kDigestBlock; ++lane) w.of[k][lane] = digest_weight(k, lane);
  return w;
}

struct DigestJob {
  const std::byte* data = nullptr;
  UnitGrid runs;        // `from`: bytes in the data, `to`: bytes in the tensor
  Index first = 0;      // place of the first run in the tensor, in bytes
  Index run_bytes = 0;  // one run's
  Divisor items_in_run;
  std::uint32_t items = 0;
  std::uint32_t group_shift = 0;  // a group is 2^group_shift threads
};

// kLoad: 16 where every vector is aligned, else 1.
template <int kLaneBytes, int kLoad>
struct DigestKernel {
  static constexpr int kVector = 16 / kLaneBytes;                            // lanes
  static constexpr int kVectors = static_cast<int>(kDigestBlock) / kVector;  // of a block
  static constexpr int kBatch = kVectors / 32;                               // of a thread, when 32 share a block

  union Lanes {
    Word<16> word;
    std::uint16_t pair[8];
    std::uint8_t byte[16];
    RESHARD_HD Lanes() : word{} {}

    RESHARD_HD std::int32_t operator[](int i) const {
      if constexpr (kLaneBytes == 1) return byte[i];
      return static_cast<std::int16_t>(pair[i]);
    }
  };
  union WeightVector {
    Word<16> word[kVector / 8];
    std::int16_t weight[kVector];
    RESHARD_HD WeightVector() : word{} {}
  };

  RESHARD_HD static void load_lane(Lanes& lanes, int i, const std::byte* at) {
    if constexpr (kLaneBytes == 1) {
      lanes.byte[i] = load_any<std::uint8_t>(at);
    } else {
      lanes.pair[i] = load_any<std::uint16_t>(at);
    }
  }

  // The lanes [lo, hi) of vector `v` of a block; zeros elsewhere. `block` is where the block's lane 0 would lie in the
  // data.
  RESHARD_HD static Lanes load(const std::byte* data, Index block, int v, int lo, int hi) {
    const int first = v * kVector;
    Lanes lanes;
    if (kLoad == 16 && first >= lo && first + kVector <= hi) {
      lanes.word = load_aligned<Word<16>>(data + (block + Index{first} * kLaneBytes));
      return lanes;
    }
    RESHARD_UNROLL
    for (int i = 0; i < kVector; ++i)
      if (first + i >= lo && first + i < hi) load_lane(lanes, i, data + (block + Index{first + i} * kLaneBytes));
    return lanes;
  }

  RESHARD_HD static void add(const Lanes& lanes, const DigestWeights& weights, int v,
                             std::uint32_t (&part)[kDigestWords]) {
    RESHARD_UNROLL
    for (int k = 0; k < kDigestWords; ++k) {
      WeightVector w;
      RESHARD_UNROLL
      for (int i = 0; i < kVector / 8; ++i)
        w.word[i] = load_aligned<Word<16>>(reinterpret_cast<const std::byte*>(&weights.of[k][v * kVector + i * 8]));
      RESHARD_UNROLL
      for (int i = 0; i < kVector; ++i) part[k] += static_cast<std::uint32_t>(lanes[i] * w.weight[i]);
    }
  }

  // Adds the part of an item that is thread `t`'s of a group of `group` to `sum`.
  RESHARD_HD static void add_item(const DigestJob& job, const DigestWeights& weights, std::uint32_t item, int t,
                                  int group, std::uint32_t (&sum)[kDigestWords]) {
    std::uint32_t in_run = item;
    const CopyOffsets run = job.runs.locate(job.items_in_run.divide(in_run));
    const Index first = (job.first + run.to) / kLaneBytes, end = first + job.run_bytes / kLaneBytes;
    const Index number = first / kDigestBlock + in_run;
    const Index base = number * kDigestBlock;
    if (base >= end) return;
    const int lo = first > base ? static_cast<int>(first - base) : 0;
    const int hi = end - base < kDigestBlock ? static_cast<int>(end - base) : static_cast<int>(kDigestBlock);
    const Index block = run.from + (base - first) * kLaneBytes;
    std::uint32_t part[kDigestWords] = {};
    if (kLoad == 16 && hi - lo == kDigestBlock && group == 32) {
      Lanes lanes[kBatch];
      RESHARD_UNROLL
      for (int i = 0; i < kBatch; ++i)
        lanes[i].word = load_aligned<Word<16>>(job.data + (block + Index{t + i * 32} * 16));
      RESHARD_UNROLL
      for (int i = 0; i < kBatch; ++i) add(lanes[i], weights, t + i * 32, part);
    } else {
      for (int v = lo / kVector + t; v * kVector < hi; v += group)
        add(load(job.data, block, v, lo, hi), weights, v, part);
    }
    RESHARD_UNROLL
    for (int k = 0; k < kDigestWords; ++k) sum[k] += part[k] * digest_key(k, number);
  }

  // Adds one worker's part of the digest to `sum`. `workers` is a multiple of 32.
  RESHARD_HD static void add_items(const DigestJob& job, const DigestWeights& weights, std::uint32_t worker,
                                   std::uint32_t workers, std::uint32_t (&sum)[kDigestWords]) {
    const std::uint32_t group = 1u << job.group_shift;
    for (std::uint32_t item = worker >> job.group_shift; item < job.items; item += workers >> job.group_shift)
      add_item(job, weights, item, static_cast<int>(worker & (group - 1)), static_cast<int>(group), sum);
  }
};

// ---- making jobs, on the CPU

// A box as runs of bytes that are contiguous both in the box and in the tensor.
inline CopyShape digest_runs(const Dims& tensor_shape, const Box& box, Index element_bytes) {
  return simplify_copy(box.shape, element_bytes, row_major_strides(box.shape), row_major_strides(tensor_shape));
}
inline Index first_byte(const Dims& tensor_shape, const Box& box, Index element_bytes) {
  const Dims strides = row_major_strides(tensor_shape);
  Index first = 0;
  for (int d = 0; d < box.rank(); ++d) first += box.origin[d] * strides[d];
  return first * element_bytes;
}

// How many blocks a run touches at most, whichever of the runs it is.
inline Index blocks_in_run(const CopyShape& runs, Index first, Index lane_bytes) {
  const Index block_bytes = kDigestBlock * lane_bytes;
  Index step = block_bytes;  // all runs begin at multiples of it from the first one on
  for (int i = 0; i < runs.loops; ++i) step = std::gcd(step, runs.loop[i].to);
  const Index latest = first % step + block_bytes - step;
  return ceil_div(latest + runs.unit, block_bytes);
}

// Whether every vector of 16 bytes that lies in a run whole is aligned in the data.
inline bool digest_is_aligned(const CopyShape& runs, const std::byte* data, Index first) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data) - static_cast<std::uintptr_t>(first);
  if (begin % 16 != 0) return false;
  return std::all_of(runs.loop, runs.loop + runs.loops,
                     [](const CopyLoop& loop) { return (loop.from - loop.to) % 16 == 0; });
}

// `runs` has at most kMaxCount items.
inline DigestJob make_digest_job(const CopyShape& runs, const std::byte* data, Index first, Index lane_bytes) {
  DigestJob job;
  job.data = data;
  job.runs = UnitGrid(runs);
  job.first = first;
  job.run_bytes = runs.unit;
  const Index items = blocks_in_run(runs, first, lane_bytes);
  job.items_in_run = Divisor(items);
  job.items = static_cast<std::uint32_t>(items * runs.count());
  const Index vectors_of_four_each = std::clamp<Index>(ceil_div(runs.unit, 64), 1, 32);
  job.group_shift = static_cast<std::uint32_t>(std::bit_width(static_cast<std::uint32_t>(vectors_of_four_each - 1)));
  return job;
}

// Brings the digest of a box into jobs of at most `most` bytes, which is kMaxCount / 4 at most: calls
// run(DigestKernel<kLaneBytes, kLoad>(), job), which adds up their digests.
template <class Run>
void plan_digest(const Dims& tensor_shape, const Box& box, Index element_bytes, const std::byte* data, Index most,
                 const Run& run) {
  const CopyShape runs = digest_runs(tensor_shape, box, element_bytes);
  const Index first = first_byte(tensor_shape, box, element_bytes);
  const Index lane_bytes = element_bytes == 1 ? 1 : 2;
  const bool aligned = digest_is_aligned(runs, data, first);
  for_each_part(runs, element_bytes, most / element_bytes, [&](const CopyShape& part, CopyOffsets at) {
    const DigestJob job = make_digest_job(part, data + at.from, first + at.to, lane_bytes);
    if (lane_bytes == 1) return aligned ? run(DigestKernel<1, 16>(), job) : run(DigestKernel<1, 1>(), job);
    return aligned ? run(DigestKernel<2, 16>(), job) : run(DigestKernel<2, 1>(), job);
  });
}

}  // namespace reshard
