// SPDX-License-Identifier: Apache-2.0
// The kernels: they distribute jobs over threads. The arithmetic is in the *_kernels.h files.
//
// Grids are no larger than what the device runs at once, so that all blocks start together; each block loops over
// tiles.
#include <type_traits>

#include "lib/device/cuda/convert_kernels.h"
#include "lib/device/cuda/copy_kernels.h"
#include "lib/device/cuda/launch.h"

namespace reshard {
namespace {

constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kWarp = 32;
__device__ const DigestWeights kWeights = make_digest_weights();

// Returns the number of blocks of `threads` threads to launch for `tiles` tiles.
template <class Kernel>
std::uint32_t blocks_for(const LaunchPlace& place, Kernel* kernel, std::uint32_t threads, Index tiles) {
  int resident = 0;
  // If this fails, the launch fails as well and reports the error.
  static_cast<void>(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, static_cast<int>(threads), 0));
  return static_cast<std::uint32_t>(
      std::clamp<Index>(tiles, 1, std::max<Index>(Index{place.multiprocessors} * resident, 1)));
}

// Returns the error of this launch, not the thread's last error, which may be the caller's.
template <class... Parts>
int start_kernel(const LaunchPlace& place, void (*kernel)(Parts...), std::uint32_t threads, Index tiles,
                 std::type_identity_t<Parts>... parts) {
  void* addresses[] = {&parts...};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                                           dim3(blocks_for(place, kernel, threads, tiles)), dim3(threads), addresses, 0,
                                           place.stream));
}

// ---- Copies

template <int kWord>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyJob job) {
  constexpr std::uint32_t kTile = kCopyBatch * kThreads;
  const std::uint32_t tiles = (job.words + (kTile - 1)) / kTile;
  for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x)
    copy_words<kWord>(job, tile, threadIdx.x, kThreads);
}

template <int kWord>
__global__ void __launch_bounds__(TransposeTile<kWord>::kThreads)
    transpose_kernel(const __grid_constant__ TransposeJob job) {
  __shared__ TransposeTile<kWord> shared;
  for (std::uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x) {
    shared.read(job, tile, threadIdx.x);
    __syncthreads();
    shared.write(job, tile, threadIdx.x);
    __syncthreads();
  }
}

struct CopyLauncher {
  const LaunchPlace& place;
  int error = 0;

  template <int kWord>
  void copy(const CopyJob& job) {
    note(start_kernel(place, copy_kernel<kWord>, kThreads, ceil_div(job.words, kCopyBatch * kThreads), job));
  }
  template <int kWord>
  void transpose(const TransposeJob& job) {
    note(start_kernel(place, transpose_kernel<kWord>, TransposeTile<kWord>::kThreads, job.tiles, job));
  }
  void note(int code) {
    if (error == 0) error = code;
  }
};

// ---- Conversions

template <class From, class To>
__global__ void __launch_bounds__(kThreads) convert_kernel(const ConvertJob job) {
  using C = DTypeConversion<From, To>;
  constexpr std::uint32_t kTile = C::kBatch * kThreads;
  const auto tiles = static_cast<std::uint32_t>((job.span.vectors + (kTile - 1)) / kTile);
  for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x)
    C::convert_vectors(job, tile, threadIdx.x, kThreads);
  C::convert_ends(job, Index{blockIdx.x} * kThreads + threadIdx.x, Index{gridDim.x} * kThreads);
}

template <class From, class To>
int start_conversion(DTypeConversion<From, To>, const LaunchPlace& place, const ConvertJob& job) {
  using C = DTypeConversion<From, To>;
  const Index tiles = ceil_div(std::max(job.span.vectors, ceil_div(job.span.n, C::kVector)), C::kBatch * kThreads);
  return start_kernel(place, convert_kernel<From, To>, kThreads, tiles, job);
}

// ---- Digests: sums over all threads

template <class T>
__device__ T add_over_warp(T v) {
  for (std::uint32_t step = kWarp / 2; step > 0; step /= 2) v += __shfl_down_sync(0xffffffffu, v, step);
  return v;
}

template <class Kernel>
__global__ void __launch_bounds__(kThreads) digest_kernel(const __grid_constant__ DigestJob job, std::uint32_t* words) {
  __shared__ DigestWeights weights;
  __shared__ std::uint32_t block_sum[kDigestWords];
  constexpr std::uint32_t kChunks = sizeof(DigestWeights) / sizeof(Word<16>);
  for (std::uint32_t i = threadIdx.x; i < kChunks; i += kThreads)
    reinterpret_cast<Word<16>*>(&weights)[i] = reinterpret_cast<const Word<16>*>(&kWeights)[i];
  if (threadIdx.x < kDigestWords) block_sum[threadIdx.x] = 0;
  __syncthreads();
  std::uint32_t sum[kDigestWords] = {};
  Kernel::add_items(job, weights, blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads, sum);
#pragma unroll
  for (int k = 0; k < kDigestWords; ++k) {
    const std::uint32_t of_warp = add_over_warp(sum[k]);
    if (threadIdx.x % kWarp == 0) atomicAdd(&block_sum[k], of_warp);
  }
  __syncthreads();
  if (threadIdx.x < kDigestWords) atomicAdd(&words[threadIdx.x], block_sum[threadIdx.x]);
}

// ---- Loading

constexpr DType kFloats[] = {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFloat16,
                             DType::kBFloat16,   DType::kFloat32,    DType::kFloat64};

struct Loader {
  int error = 0;

  template <class Kernel>
  void load(Kernel* kernel) {
    cudaFuncAttributes attributes;
    const cudaError_t code = cudaFuncGetAttributes(&attributes, kernel);
    if (code != cudaSuccess) error = static_cast<int>(code);
  }
  template <int... kWords>
  void load_copies() {
    (load(copy_kernel<kWords>), ...);
    (load(transpose_kernel<kWords>), ...);
  }
  template <DigestReads... kReads>
  void load_digests() {
    (load(digest_kernel<DigestKernel<1, kReads>>), ...);
    (load(digest_kernel<DigestKernel<2, kReads>>), ...);
  }
  template <class From, class To>
  void load_conversion(DTypeConversion<From, To>) {
    load(convert_kernel<From, To>);
  }
};

}  // namespace

int load_kernels() {
  Loader loader;
  loader.load_copies<1, 2, 4, 8, 16>();
  for (const DType from : kFloats)
    for (const DType to : kFloats)
      with_conversion(from, to, [&](auto conversion) { loader.load_conversion(conversion); });
  loader.load_digests<DigestReads::kLanes, DigestReads::kVectors, DigestReads::kBlocks>();
  return loader.error;
}

int launch_copy(const LaunchPlace& place, const CopyShape& shape, const std::byte* from, std::byte* to) {
  CopyLauncher launcher{place};
  plan_copy(shape, from, to, kMaxCount, launcher);
  return launcher.error;
}

int launch_convert(const LaunchPlace& place, DType from, DType to, const std::byte* in, std::byte* out, Index n) {
  int error = 0;
  with_conversion(from, to, [&](auto conversion) {
    using C = decltype(conversion);
    for (Index done = 0; done < n && error == 0; done += kMaxCount) {
      const std::byte* part_in = in + done * byte_size(from);
      std::byte* part_out = out + done * byte_size(to);
      error = start_conversion(conversion, place, C::make(part_in, part_out, std::min(n - done, kMaxCount)));
    }
  });
  return error;
}

int launch_digest(const LaunchPlace& place, const Dims& tensor_shape, const Box& box, Index element_bytes,
                  const std::byte* data, std::uint32_t* words) {
  int error = 0;
  const auto start = [&](auto kernel, const DigestJob& job) {
    if (error != 0) return;
    const Index threads = Index{job.items} << job.group_shift;
    error = start_kernel(place, digest_kernel<decltype(kernel)>, kThreads, ceil_div(threads, kThreads), job, words);
  };
  plan_digest(tensor_shape, box, element_bytes, data, kMaxCount / 4, start);
  return error;
}

}  // namespace reshard
