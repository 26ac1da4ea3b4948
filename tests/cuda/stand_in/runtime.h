// A CUDA runtime and a driver without a GPU, as strict as the real ones are where it matters: every stream is a thread
// that works off its queue, freeing waits for all of them, pinned memory begins at 512 bytes past a page, errors stay
// the last error until asked for, threads have current contexts, and after the exit handlers nothing works. Memory of a
// GPU is ordinary memory, but copies between the sides take pinned and device memory only.
//
// The environment says what there is: STAND_IN_GPUS (2), STAND_IN_CAPABILITY (9), STAND_IN_CONTEXT_BYTES (0: what a
// context takes of the host's memory), STAND_IN_FLAW (copies of so many bytes leave the last one out),
// STAND_IN_CONNECTIONS (no context is made where CUDA_DEVICE_MAX_CONNECTIONS is another number).
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace reshard::stand_in {

// Contexts made of a GPU so far by whoever called without a current one, or chose a device: not those that were
// retained.
int accidental_contexts(int gpu);
int pinned_allocations();  // so far

// The work that was queued so far.
struct Queued {
  int uploads = 0, downloads = 0, kernels = 0;
};
Queued queued();

// The next call of this function fails.
void fail_next(const std::string& function, cudaError_t code);

// Queues `work` on a stream of the current GPU.
cudaError_t queue(cudaStream_t stream, std::function<void()> work);
cudaError_t queue_kernel(cudaStream_t stream, std::function<void()> kernel);
bool is_device_memory(const void* from);

}  // namespace reshard::stand_in
