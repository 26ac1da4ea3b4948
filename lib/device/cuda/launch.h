// SPDX-License-Identifier: Apache-2.0
// Kernel launches. This header uses no CUDA types, so that everything except kernels.cu is ordinary C++.
#pragma once

#include "lib/device/cuda/digest_kernels.h"

struct CUstream_st;  // a cudaStream_t points to it

namespace reshard {

// The stream on which kernels run.
struct LaunchPlace {
  CUstream_st* stream = nullptr;
  int multiprocessors = 0;  // multiprocessors of the device, which must be the thread's current one
};

// Loads all kernels into the thread's current device, which otherwise happens at the first launch of each. Returns a
// cudaError_t, 0 for success.
int load_kernels();

// All pointers are to device memory. Each function queues kernels and returns a cudaError_t, 0 for success, for errors
// of the launch. Errors of the execution are reported when the stream is waited for.
int launch_copy(const LaunchPlace& place, const CopyShape& shape, const std::byte* from, std::byte* to);
int launch_convert(const LaunchPlace& place, DType from, DType to, const std::byte* in, std::byte* out, Index n);
// Adds the digest to the kDigestWords numbers at `words`.
int launch_digest(const LaunchPlace& place, const Dims& tensor_shape, const Box& box, Index element_bytes,
                  const std::byte* data, std::uint32_t* words);

}  // namespace reshard
