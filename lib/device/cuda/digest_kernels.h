// SPDX-License-Identifier: Apache-2.0
// The digest on a GPU: the kernel's arithmetic, which also runs on a CPU (host_device.h). The result equals that of
// digest.h bit for bit, because sums modulo 2^32 do not depend on the order.
//
// An item is the part of a block of 1024 lanes that is in one run. A group of up to 32 neighbouring threads processes
// an item in vectors of 16 bytes, and each thread multiplies by the block's key once for all its vectors.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>

#include "lib/device/cuda/copy_kernels.h"
#include "lib/device/digest.h"

namespace reshard {

// Sums of products of packed bytes or halves, modulo 2^32; one instruction each on a GPU.

// Returns `sum` plus each of the four bytes of x times the matching byte of w, which is signed if kSigned.
template <bool kSigned>
RESHARD_HD std::uint32_t add_bytes(std::uint32_t x, std::uint32_t w, std::uint32_t sum) {
#ifdef __CUDA_ARCH__
  if constexpr (kSigned) {
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(w), "r"(sum));
  } else {
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(w), "r"(sum));
  }
  return sum;
#else
  for (int i = 0; i < 32; i += 8) {
    const auto byte = static_cast<std::uint8_t>(w >> i);
    const std::int32_t weight = kSigned ? static_cast<std::int8_t>(byte) : byte;
    sum += static_cast<std::uint32_t>(static_cast<std::int32_t>(x >> i & 0xff) * weight);
  }
  return sum;
#endif
}

// Returns `sum` plus the two signed halves of x, each times a byte of w: the lower two bytes if kHalf is 0, else the
// upper two.
template <bool kSigned, int kHalf>
RESHARD_HD std::uint32_t add_halves(std::uint32_t x, std::uint32_t w, std::uint32_t sum) {
#ifdef __CUDA_ARCH__
  if constexpr (kSigned && kHalf == 0) {
    asm("dp2a.lo.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(w), "r"(sum));
  } else if constexpr (kSigned) {
    asm("dp2a.hi.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(w), "r"(sum));
  } else if constexpr (kHalf == 0) {
    asm("dp2a.lo.s32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(w), "r"(sum));
  } else {
    asm("dp2a.hi.s32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(w), "r"(sum));
  }
  return sum;
#else
  for (int i = 0; i < 2; ++i) {
    const auto byte = static_cast<std::uint8_t>(w >> (16 * kHalf + 8 * i));
    const std::int32_t weight = kSigned ? static_cast<std::int8_t>(byte) : byte;
    sum += static_cast<std::uint32_t>(static_cast<std::int16_t>(x >> (16 * i)) * weight);
  }
  return sum;
#endif
}

// The weights of each word, in groups of eight lanes: the low bytes of the first four lanes, those of the other four,
// then the high bytes, which carry the sign. On a GPU each block of threads keeps them in shared memory.
struct alignas(16) DigestWeights {
  std::uint32_t of[kDigestWords][kDigestBlock / 8][4];
};
constexpr DigestWeights make_digest_weights() {
  DigestWeights w{};
  for (int k = 0; k < kDigestWords; ++k)
    for (Index lane = 0; lane < kDigestBlock; ++lane) {
      const auto weight = static_cast<std::uint16_t>(digest_weight(k, lane));
      const Index four = lane % 8 / 4, shift = lane % 4 * 8;
      w.of[k][lane / 8][four] |= static_cast<std::uint32_t>(weight & 0xff) << shift;
      w.of[k][lane / 8][2 + four] |= static_cast<std::uint32_t>(weight >> 8) << shift;
    }
  return w;
}

// Sums of lanes times the low and high bytes of their weights.
struct DigestSums {
  std::uint32_t low[kDigestWords] = {}, high[kDigestWords] = {};
};

struct DigestJob {
  const std::byte* data = nullptr;
  UnitGrid runs;        // `from`: bytes in the data, `to`: bytes in the tensor
  Index first = 0;      // byte offset of the first run in the tensor
  Index run_bytes = 0;  // size of one run
  Divisor items_in_run;
  std::uint32_t items = 0;
  std::uint32_t group_shift = 0;  // a group is 2^group_shift threads
};

// What a kernel reads at once: a lane; a vector of 16 bytes, where every one is aligned; or a thread's vectors of
// several blocks, where also 32 threads share each item.
enum class DigestReads { kLanes, kVectors, kBlocks };

template <int kLaneBytes, DigestReads kReads>
struct DigestKernel {
  static constexpr int kVector = 16 / kLaneBytes;                            // lanes
  static constexpr int kVectors = static_cast<int>(kDigestBlock) / kVector;  // in a block
  static constexpr int kBatch = kVectors / 32;  // vectors per thread, if 32 threads share a block
  static constexpr int kItems = 4 / kBatch;     // items that a thread takes at once: four vectors
  static constexpr bool kKeepsWeights = kLaneBytes == 1;

  union Lanes {
    Word<16> word;
    std::uint16_t pair[8];
    std::uint8_t byte[16];
    RESHARD_HD Lanes() : word{} {}
  };

  RESHARD_HD static void load_lane(Lanes& lanes, int i, const std::byte* at) {
    if constexpr (kLaneBytes == 1) {
      lanes.byte[i] = load_any<std::uint8_t>(at);
    } else {
      lanes.pair[i] = load_any<std::uint16_t>(at);
    }
  }

  // Returns the lanes [lo, hi) of vector `v` of a block, with zeros elsewhere. `block` is the offset in the data at
  // which the block's lane 0 would be.
  RESHARD_HD static Lanes load(const std::byte* data, Index block, int v, int lo, int hi) {
    const int first = v * kVector;
    Lanes lanes;
    if (kReads != DigestReads::kLanes && first >= lo && first + kVector <= hi) {
      lanes.word = load_aligned<Word<16>>(data + (block + Index{first} * kLaneBytes));
      return lanes;
    }
    RESHARD_UNROLL
    for (int i = 0; i < kVector; ++i)
      if (first + i >= lo && first + i < hi) load_lane(lanes, i, data + (block + Index{first + i} * kLaneBytes));
    return lanes;
  }

  // The weights of one vector.
  struct VectorWeights {
    Word<16> of[kDigestWords][kVector / 8];
  };
  RESHARD_HD static VectorWeights weights_of(const DigestWeights& weights, int v) {
    VectorWeights out;
    RESHARD_UNROLL
    for (int k = 0; k < kDigestWords; ++k) {
      RESHARD_UNROLL
      for (Index i = 0; i < kVector / 8; ++i)
        out.of[k][i] =
            load_aligned<Word<16>>(reinterpret_cast<const std::byte*>(weights.of[k][Index{v} * (kVector / 8) + i]));
    }
    return out;
  }

  RESHARD_HD static void add(const Lanes& lanes, const VectorWeights& weights, DigestSums& sums) {
    const std::uint32_t(&x)[4] = lanes.word.single;
    RESHARD_UNROLL
    for (int k = 0; k < kDigestWords; ++k) {
      std::uint32_t low = sums.low[k], high = sums.high[k];
      RESHARD_UNROLL
      for (Index i = 0; i < kVector / 8; ++i) {
        const std::uint32_t(&w)[4] = weights.of[k][i].single;
        if constexpr (kLaneBytes == 1) {
          low = add_bytes<false>(x[2 * i], w[0], low);
          low = add_bytes<false>(x[2 * i + 1], w[1], low);
          high = add_bytes<true>(x[2 * i], w[2], high);
          high = add_bytes<true>(x[2 * i + 1], w[3], high);
        } else {
          low = add_halves<false, 0>(x[0], w[0], low);
          low = add_halves<false, 1>(x[1], w[0], low);
          low = add_halves<false, 0>(x[2], w[1], low);
          low = add_halves<false, 1>(x[3], w[1], low);
          high = add_halves<true, 0>(x[0], w[2], high);
          high = add_halves<true, 1>(x[1], w[2], high);
          high = add_halves<true, 0>(x[2], w[3], high);
          high = add_halves<true, 1>(x[3], w[3], high);
        }
      }
      sums.low[k] = low;
      sums.high[k] = high;
    }
  }

  // The lanes [lo, hi) of a block.
  struct Item {
    Index number = 0;  // the block's, in the tensor
    Index block = 0;   // offset in the data at which the block's lane 0 would be
    int lo = 0, hi = 0;
    RESHARD_HD bool is_whole() const { return hi - lo == kDigestBlock; }
  };

  // Returns an empty item if a run has no such block.
  RESHARD_HD static Item locate(const DigestJob& job, std::uint32_t item) {
    std::uint32_t in_run = item;
    const CopyOffsets run = job.runs.locate(job.items_in_run.divide(in_run));
    const Index first = (job.first + run.to) / kLaneBytes, end = first + job.run_bytes / kLaneBytes;
    Item out;
    out.number = first / kDigestBlock + in_run;
    const Index base = out.number * kDigestBlock;
    out.block = run.from + (base - first) * kLaneBytes;
    if (base >= end) return out;
    out.lo = first > base ? static_cast<int>(first - base) : 0;
    out.hi = end - base < kDigestBlock ? static_cast<int>(end - base) : static_cast<int>(kDigestBlock);
    return out;
  }

  RESHARD_HD static void add_part(const DigestSums& part, Index number, std::uint32_t (&sum)[kDigestWords]) {
    RESHARD_UNROLL
    for (int k = 0; k < kDigestWords; ++k) sum[k] += (part.low[k] + (part.high[k] << 8)) * digest_key(k, number);
  }

  // Adds the part of an item that belongs to thread `t` of `group` threads to `sum`.
  RESHARD_HD static void add_item(const DigestJob& job, const DigestWeights& weights, const Item& item, int t,
                                  int group, std::uint32_t (&sum)[kDigestWords]) {
    DigestSums part;
    for (int v = item.lo / kVector + t; v * kVector < item.hi; v += group)
      add(load(job.data, item.block, v, item.lo, item.hi), weights_of(weights, v), part);
    add_part(part, item.number, sum);
  }

  // Adds one worker's part of the digest to `sum`. `workers` must be a multiple of 32.
  RESHARD_HD static void add_items(const DigestJob& job, const DigestWeights& weights, std::uint32_t worker,
                                   std::uint32_t workers, std::uint32_t (&sum)[kDigestWords]) {
    if constexpr (kReads == DigestReads::kBlocks) {
      add_blocks(job, weights, worker, workers, sum);
    } else {
      const std::uint32_t group = 1u << job.group_shift;
      for (std::uint32_t item = worker >> job.group_shift; item < job.items; item += workers >> job.group_shift)
        add_item(job, weights, locate(job, item), static_cast<int>(worker & (group - 1)), static_cast<int>(group), sum);
    }
  }

  // The same for kBlocks. A thread has the same vectors of every block. Where lanes are bytes, it keeps these vectors'
  // weights in registers, because reading them takes longer than reading the lanes.
  RESHARD_HD static void add_blocks(const DigestJob& job, const DigestWeights& weights, std::uint32_t worker,
                                    std::uint32_t workers, std::uint32_t (&sum)[kDigestWords]) {
    const auto t = static_cast<int>(worker % 32);
    const std::uint32_t step = workers / 32;
    VectorWeights kept[kBatch];
    if constexpr (kKeepsWeights) {
      RESHARD_UNROLL
      for (int i = 0; i < kBatch; ++i) kept[i] = weights_of(weights, t + i * 32);
    }
    for (std::uint32_t first = worker / 32; first < job.items; first += kItems * step) {
      Item item[kItems];
      bool are_whole = true;
      RESHARD_UNROLL
      for (std::uint32_t j = 0; j < kItems; ++j) {
        if (first + j * step < job.items) item[j] = locate(job, first + j * step);
        are_whole = are_whole && item[j].is_whole();
      }
      if (!are_whole) {
        RESHARD_NO_UNROLL
        for (std::uint32_t j = 0; j < kItems && first + j * step < job.items; ++j)
          add_item(job, weights, locate(job, first + j * step), t, 32, sum);
        continue;
      }
      Lanes lanes[kItems][kBatch];
      RESHARD_UNROLL
      for (int j = 0; j < kItems; ++j) {
        RESHARD_UNROLL
        for (int i = 0; i < kBatch; ++i)
          lanes[j][i].word = load_aligned<Word<16>>(job.data + (item[j].block + Index{t + i * 32} * 16));
      }
      RESHARD_UNROLL
      for (int j = 0; j < kItems; ++j) {
        DigestSums part;
        RESHARD_UNROLL
        for (int i = 0; i < kBatch; ++i)
          add(lanes[j][i], kKeepsWeights ? kept[i] : weights_of(weights, t + i * 32), part);
        add_part(part, item[j].number, sum);
      }
    }
  }
};

// ---- Making jobs, on the CPU

// Returns a box as runs of bytes that are contiguous both in the box and in the tensor.
inline CopyShape digest_runs(const Dims& tensor_shape, const Box& box, Index element_bytes) {
  return simplify_copy(box.shape, element_bytes, row_major_strides(box.shape), row_major_strides(tensor_shape));
}
inline Index first_byte(const Dims& tensor_shape, const Box& box, Index element_bytes) {
  const Dims strides = row_major_strides(tensor_shape);
  Index first = 0;
  for (int d = 0; d < box.rank(); ++d) first += box.origin[d] * strides[d];
  return first * element_bytes;
}

// Returns the largest number of blocks that a run can touch.
inline Index blocks_in_run(const CopyShape& runs, Index first, Index lane_bytes) {
  const Index block_bytes = kDigestBlock * lane_bytes;
  Index step = block_bytes;  // runs begin at multiples of it from the first one
  for (int i = 0; i < runs.loops; ++i) step = std::gcd(step, runs.loop[i].to);
  const Index latest = first % step + block_bytes - step;
  return ceil_div(latest + runs.unit, block_bytes);
}

// Returns whether every 16-byte vector inside a run is aligned in the data.
inline bool digest_is_aligned(const CopyShape& runs, const std::byte* data, Index first) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data) - static_cast<std::uintptr_t>(first);
  if (begin % 16 != 0) return false;
  return std::all_of(runs.loop, runs.loop + runs.loops,
                     [](const CopyLoop& loop) { return (loop.from - loop.to) % 16 == 0; });
}

// `runs` must have at most kMaxCount items.
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

// Splits the digest of a box into jobs of at most `most` bytes (at most kMaxCount / 4), and calls
// run(DigestKernel<kLaneBytes, kReads>(), job) for each; their digests add up.
template <class Run>
void plan_digest(const Dims& tensor_shape, const Box& box, Index element_bytes, const std::byte* data, Index most,
                 const Run& run) {
  const CopyShape runs = digest_runs(tensor_shape, box, element_bytes);
  const Index first = first_byte(tensor_shape, box, element_bytes);
  const bool aligned = digest_is_aligned(runs, data, first);
  const auto run_part = [&]<int kLaneBytes>(const CopyShape& part, CopyOffsets at) {
    const DigestJob job = make_digest_job(part, data + at.from, first + at.to, kLaneBytes);
    if (!aligned) return run(DigestKernel<kLaneBytes, DigestReads::kLanes>(), job);
    // Fewer than 32 threads share an item.
    if (job.group_shift < 5) return run(DigestKernel<kLaneBytes, DigestReads::kVectors>(), job);
    return run(DigestKernel<kLaneBytes, DigestReads::kBlocks>(), job);
  };
  for_each_part(runs, element_bytes, most / element_bytes, [&](const CopyShape& part, CopyOffsets at) {
    return element_bytes == 1 ? run_part.template operator()<1>(part, at) : run_part.template operator()<2>(part, at);
  });
}

}  // namespace reshard
