// Runs the kernels on the stand-in's streams: the same bodies that a GPU runs, every thread of every tile in turn, with
// conversion instructions implemented as NVIDIA documents them.
#include <memory>

#include "lib/device/cuda/convert_kernels.h"
#include "lib/device/cuda/launch.h"
#include "tests/cuda/stand_in/runtime.h"
#include "tests/support/documented_instructions.h"

namespace reshard {
namespace {

constexpr DigestWeights kWeights = make_digest_weights();

struct CopyOnStream {
  const LaunchPlace& place;

  template <int kWord>
  void copy(const CopyJob& job) {
    constexpr std::uint32_t kThreads = 32, kTile = kCopyBatch * kThreads;
    stand_in::queue_kernel(place.stream, [job] {
      for (std::uint32_t tile = 0; tile * kTile < job.words; ++tile)
        for (std::uint32_t t = 0; t < kThreads; ++t) copy_words<kWord>(job, tile, t, kThreads);
    });
  }
  template <int kWord>
  void transpose(const TransposeJob& job) {
    stand_in::queue_kernel(place.stream, [job] {
      auto tile = std::make_unique<TransposeTile<kWord>>();
      for (std::uint32_t i = 0; i < job.tiles; ++i) {
        for (std::uint32_t t = 0; t < tile->kThreads; ++t) tile->read(job, i, t);
        for (std::uint32_t t = 0; t < tile->kThreads; ++t) tile->write(job, i, t);
      }
    });
  }
};

int started() { return static_cast<int>(cudaGetLastError()); }

bool on_device(const void* a, const void* b) { return stand_in::is_device_memory(a) && stand_in::is_device_memory(b); }

}  // namespace

int load_kernels() { return 0; }

int launch_copy(const LaunchPlace& place, const CopyShape& shape, const std::byte* from, std::byte* to) {
  if (!on_device(from, to)) return cudaErrorInvalidValue;
  CopyOnStream copies{place};
  plan_copy(shape, from, to, kMaxCount, copies);
  return started();
}

int launch_convert(const LaunchPlace& place, DType from, DType to, const std::byte* in, std::byte* out, Index n) {
  if (n > 0 && !on_device(in, out)) return cudaErrorInvalidValue;
  with_conversion(from, to, [&](auto conversion) {
    using C = decltype(conversion);
    stand_in::queue_kernel(place.stream, [job = C::make(in, out, n)] {
      constexpr std::uint32_t kThreads = 32;
      for (std::uint32_t tile = 0; tile * C::kBatch * kThreads < job.span.vectors; ++tile)
        for (std::uint32_t t = 0; t < kThreads; ++t)
          C::template convert_vectors<DocumentedInstructions>(job, tile, t, kThreads);
      C::convert_ends(job, 0, 1);
    });
  });
  return started();
}

int launch_digest(const LaunchPlace& place, const Dims& tensor_shape, const Box& box, Index element_bytes,
                  const std::byte* data, std::uint32_t* words) {
  if (!on_device(data, words)) return cudaErrorInvalidValue;
  plan_digest(tensor_shape, box, element_bytes, data, kMaxCount / 4, [&](auto kernel, const DigestJob& job) {
    stand_in::queue_kernel(place.stream, [kernel, job, words] {
      constexpr std::uint32_t kWorkers = 32;
      for (std::uint32_t worker = 0; worker < kWorkers; ++worker) {
        std::uint32_t sum[kDigestWords] = {};
        kernel.add_items(job, kWeights, worker, kWorkers, sum);
        for (int k = 0; k < kDigestWords; ++k) words[k] += sum[k];
      }
    });
  });
  return started();
}

}  // namespace reshard
