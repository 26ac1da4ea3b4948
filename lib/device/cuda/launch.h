// Starting the kernels. This header names nothing of CUDA's own, so that all but kernels.cu is ordinary C++.
#pragma once

#include "lib/device/cuda/digest_kernels.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace reshard {

// Where kernels run.
struct LaunchPlace {
  CUstream_st* stream = nullptr;
  int multiprocessors = 0;  // of the device, which is the calling thread's current one
};

// Loads all kernels into the calling thread's current device, which else happens when each is first started. Returns a
// cudaError_t, 0 for none.
int load_kernels();

// All pointers are to device memory. Each queues kernels and returns a cudaError_t, 0 for none: an error in starting
// them; one in running them shows when the stream is waited for.
int launch_copy(const LaunchPlace& place, const CopyShape& shape, const std::byte* from, std::byte* to);
int launch_convert(const LaunchPlace& place, DType from, DType to, const std::byte* in, std::byte* out, Index n);
// Adds to the kDigestWords numbers at `words`.
int launch_digest(const LaunchPlace& place, const Dims& tensor_shape, const Box& box, Index element_bytes,
                  const std::byte* data, std::uint32_t* words);

}  // namespace reshard
