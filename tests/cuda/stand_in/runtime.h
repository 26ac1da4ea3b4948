// A CUDA runtime and driver without a GPU, as strict as the real ones in what our code relies on:
//
//   - Every stream is a thread with a queue; freeing memory waits for all streams.
//   - Device memory is ordinary memory, but copies between host and device accept pinned and device memory only. Pinned
//     memory begins 512 bytes after a page, so that code cannot rely on page alignment.
//   - An error remains the last error until it is fetched, threads have current contexts, and no call works after the
//     exit handlers.
//
// Environment variables, with defaults: STAND_IN_GPUS (2), STAND_IN_CAPABILITY (9), STAND_IN_CONTEXT_BYTES (0; host
// memory that a context takes), STAND_IN_NCCL_BYTES (0; the same of NCCL), STAND_IN_FLAW (copies of this many bytes
// omit the last one).
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace reshard::stand_in {

// Returns how many contexts of a GPU were created implicitly so far: by a call without a current context, or by
// choosing a device. Retained contexts do not count.
int accidental_contexts(int gpu);
int pinned_allocations();  // number so far

// Numbers of operations queued so far.
struct Queued {
  int uploads = 0, downloads = 0, kernels = 0;
};
Queued queued();

// Makes the next call of this function fail.
void fail_next(const std::string& function, cudaError_t code);

// Queues `work` on a stream of the current GPU.
cudaError_t queue(cudaStream_t stream, std::function<void()> work);
cudaError_t queue_kernel(cudaStream_t stream, std::function<void()> kernel);
bool is_device_memory(const void* from);

}  // namespace reshard::stand_in
