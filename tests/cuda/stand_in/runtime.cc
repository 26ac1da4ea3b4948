#include "tests/cuda/stand_in/runtime.h"

#include <cuda.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

struct CUctx_st {
  int gpu = 0;
};

// A queue and the thread that runs its work.
struct CUstream_st {
  explicit CUstream_st(int of) : gpu(of), worker([this] { work(); }) {}
  ~CUstream_st() {
    {
      const std::lock_guard lock(mutex);
      ends = true;
    }
    changed.notify_all();
    worker.join();
  }
  CUstream_st(const CUstream_st&) = delete;
  CUstream_st& operator=(const CUstream_st&) = delete;

  void work() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return ends || !queue.empty(); });
      if (queue.empty()) return;
      const std::function<void()> next = std::move(queue.front());
      lock.unlock();
      next();
      lock.lock();
      queue.pop_front();
      changed.notify_all();
    }
  }
  void add(std::function<void()> next) {
    const std::lock_guard lock(mutex);
    queue.push_back(std::move(next));
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return queue.empty(); });
  }

  int gpu;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;  // the first is running
  bool ends = false;
  std::thread worker;
};

struct CUevent_st {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = true;
  };
  int gpu = 0;
  std::shared_ptr<State> state = std::make_shared<State>();
};

namespace reshard::stand_in {
namespace {

constexpr int kMostGpus = 8;
constexpr std::size_t kGpuBytes = std::size_t{4} << 30;

int number(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

struct Machine {
  std::mutex mutex;
  std::array<CUctx_st, kMostGpus> contexts;
  std::array<int, kMostGpus> accidents{};
  std::array<bool, kMostGpus> exists{};  // whether each context exists
  std::array<std::size_t, kMostGpus> used{};
  std::map<CUstream_st*, std::shared_ptr<CUstream_st>> streams;
  std::map<const std::byte*, std::pair<std::size_t, int>> device_memory;  // bytes, GPU
  std::map<const std::byte*, std::pair<std::size_t, void*>> pinned;       // size, and the pointer to free
  std::map<std::string, cudaError_t> failures;
  std::vector<std::string> ballast;
  int pinned_made = 0;
  Queued queued;
  Machine() {
    for (int i = 0; i < kMostGpus; ++i) contexts[static_cast<std::size_t>(i)].gpu = i;
  }
};
Machine& machine() {
  static auto* const one = new Machine;
  return *one;
}
std::atomic<bool> ended{false};

thread_local std::vector<CUctx_st*> stack;
thread_local int chosen = 0;
thread_local cudaError_t last = cudaSuccess;

cudaError_t failed(cudaError_t code) {
  last = code;
  return code;
}

void make_context(int gpu) {
  static const bool registered = std::atexit([] { ended = true; }) == 0;
  static_cast<void>(registered);
  Machine& m = machine();
  const auto i = static_cast<std::size_t>(gpu);
  if (m.exists[i]) return;
  m.exists[i] = true;
  if (const int bytes = number("STAND_IN_CONTEXT_BYTES", 0); bytes > 0)
    m.ballast.emplace_back(static_cast<std::size_t>(bytes), 'x');
}

// Begins a call that needs a context: finds its GPU, or the error to return.
struct Call {
  cudaError_t code = cudaSuccess;
  int gpu = 0;
};
Call begin(const char* function) {
  if (ended) return {failed(cudaErrorCudartUnloading), 0};
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  Call call;
  if (stack.empty()) {
    ++m.accidents[static_cast<std::size_t>(chosen)];
    make_context(chosen);
    call.gpu = chosen;
  } else {
    call.gpu = stack.back()->gpu;
  }
  if (const auto it = m.failures.find(function); it != m.failures.end()) {
    call.code = failed(it->second);
    m.failures.erase(it);
  }
  return call;
}

bool lies_in(const auto& memory, const void* from, std::size_t bytes) {
  const auto* const first = static_cast<const std::byte*>(from);
  auto it = memory.upper_bound(first);
  if (it == memory.begin()) return false;
  --it;
  return first + bytes <= it->first + it->second.first;
}

void wait_for_all(int gpu) {
  Machine& m = machine();
  std::vector<std::shared_ptr<CUstream_st>> all;
  {
    const std::lock_guard lock(m.mutex);
    for (const auto& [name, stream] : m.streams)
      if (stream->gpu == gpu) all.push_back(stream);
  }
  for (const auto& stream : all) stream->wait();
}

CUresult cu_device_get(CUdevice* device, int ordinal) {
  *device = 100 + ordinal;
  return ordinal < number("STAND_IN_GPUS", 2) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cu_retain(CUcontext* context, CUdevice device) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  make_context(device - 100);
  *context = &m.contexts[static_cast<std::size_t>(device - 100)];
  return CUDA_SUCCESS;
}
CUresult cu_release(CUdevice) { return ended ? CUDA_ERROR_DEINITIALIZED : CUDA_SUCCESS; }
CUresult cu_push(CUcontext context) {
  if (ended) return CUDA_ERROR_DEINITIALIZED;
  stack.push_back(context);
  return CUDA_SUCCESS;
}
CUresult cu_pop(CUcontext* context) {
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = stack.back();
  stack.pop_back();
  return CUDA_SUCCESS;
}

}  // namespace

int accidental_contexts(int gpu) {
  const std::lock_guard lock(machine().mutex);
  return machine().accidents[static_cast<std::size_t>(gpu)];
}
int pinned_allocations() {
  const std::lock_guard lock(machine().mutex);
  return machine().pinned_made;
}
Queued queued() {
  const std::lock_guard lock(machine().mutex);
  return machine().queued;
}
void fail_next(const std::string& function, cudaError_t code) {
  const std::lock_guard lock(machine().mutex);
  machine().failures[function] = code;
}
cudaError_t queue(cudaStream_t stream, std::function<void()> work) {
  const Call call = begin("queue");
  if (call.code != cudaSuccess) return call.code;
  if (stream->gpu != call.gpu) return failed(cudaErrorInvalidResourceHandle);
  stream->add(std::move(work));
  return cudaSuccess;
}
cudaError_t queue_kernel(cudaStream_t stream, std::function<void()> kernel) {
  {
    const std::lock_guard lock(machine().mutex);
    ++machine().queued.kernels;
  }
  return queue(stream, std::move(kernel));
}
bool is_device_memory(const void* from) {
  const std::lock_guard lock(machine().mutex);
  return lies_in(machine().device_memory, from, 1);
}

}  // namespace reshard::stand_in

using namespace reshard::stand_in;

extern "C" {

const char* cudaGetErrorString(cudaError_t code) {
  switch (code) {
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    default:
      return "an error";
  }
}
cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = number("STAND_IN_GPUS", 2);
  return *count > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "stand-in");
  properties->major = number("STAND_IN_CAPABILITY", 9);
  properties->multiProcessorCount = 4;
  properties->uuid.bytes[0] = 0x5a;
  properties->uuid.bytes[15] = static_cast<char>(device);
  return device < number("STAND_IN_GPUS", 2) ? cudaSuccess : failed(cudaErrorInvalidDevice);
}
cudaError_t cudaSetDevice(int device) {
  if (!stack.empty()) stack.pop_back();
  chosen = device;
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  ++m.accidents[static_cast<std::size_t>(device)];
  make_context(device);
  stack.push_back(&m.contexts[static_cast<std::size_t>(device)]);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = stack.empty() ? chosen : stack.back()->gpu;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  const Call call = begin("cudaDeviceSynchronize");
  if (call.code == cudaSuccess) wait_for_all(call.gpu);
  return call.code;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const std::map<std::string_view, void*> all = {{"cuDeviceGet", reinterpret_cast<void*>(cu_device_get)},
                                                 {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(cu_retain)},
                                                 {"cuDevicePrimaryCtxRelease", reinterpret_cast<void*>(cu_release)},
                                                 {"cuCtxPushCurrent", reinterpret_cast<void*>(cu_push)},
                                                 {"cuCtxPopCurrent", reinterpret_cast<void*>(cu_pop)}};
  const auto it = all.find(symbol);
  *result = it == all.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  *function = it == all.end() ? nullptr : it->second;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 0, flags, result);
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  const Call call = begin("cudaMalloc");
  if (call.code != cudaSuccess) return call.code;
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  std::size_t& used = m.used[static_cast<std::size_t>(call.gpu)];
  if (bytes > kGpuBytes - used) return failed(cudaErrorMemoryAllocation);
  auto* const p = static_cast<std::byte*>(std::aligned_alloc(512, (bytes + 511) / 512 * 512));
  std::memset(p, 0xA5, bytes);
  used += bytes;
  m.device_memory[p] = {bytes, call.gpu};
  *memory = p;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  const Call call = begin("cudaFree");
  if (call.code != cudaSuccess) return call.code;
  wait_for_all(call.gpu);
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  const auto it = m.device_memory.find(static_cast<std::byte*>(memory));
  if (it == m.device_memory.end()) return failed(cudaErrorInvalidValue);
  m.used[static_cast<std::size_t>(it->second.second)] -= it->second.first;
  m.device_memory.erase(it);
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const Call call = begin("cudaMemGetInfo");
  *total = kGpuBytes;
  *free = kGpuBytes - machine().used[static_cast<std::size_t>(call.gpu)];
  return call.code;
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  const Call call = begin("cudaHostAlloc");
  if (call.code != cudaSuccess) return call.code;
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  auto* const p = static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 512 + 4095) / 4096 * 4096));
  if (!p) return failed(cudaErrorMemoryAllocation);
  std::memset(p, 0x5A, bytes + 512);
  m.pinned[p + 512] = {bytes, p};
  ++m.pinned_made;
  *memory = p + 512;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  const Call call = begin("cudaFreeHost");
  if (call.code != cudaSuccess) return call.code;
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  const auto it = m.pinned.find(static_cast<std::byte*>(memory));
  if (it == m.pinned.end()) return failed(cudaErrorInvalidValue);
  std::free(it->second.second);
  m.pinned.erase(it);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const Call call = begin("cudaStreamCreate");
  if (call.code != cudaSuccess) return call.code;
  auto made = std::make_shared<CUstream_st>(call.gpu);
  *stream = made.get();
  const std::lock_guard lock(machine().mutex);
  machine().streams[*stream] = std::move(made);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Call call = begin("cudaStreamSynchronize");
  if (call.code == cudaSuccess) stream->wait();
  return call.code;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Call call = begin("cudaStreamDestroy");
  if (call.code != cudaSuccess) return call.code;
  std::shared_ptr<CUstream_st> ends;
  {
    const std::lock_guard lock(machine().mutex);
    ends = std::move(machine().streams[stream]);
    machine().streams.erase(stream);
  }
  ends->wait();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const Call call = begin("cudaEventCreate");
  if (call.code == cudaSuccess) *event = new CUevent_st{call.gpu};
  return call.code;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Call call = begin("cudaEventDestroy");
  if (call.code == cudaSuccess) delete event;
  return call.code;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  {
    const std::lock_guard lock(event->state->mutex);
    event->state->reached = false;
  }
  return queue(stream, [state = event->state] {
    const std::lock_guard lock(state->mutex);
    state->reached = true;
    state->changed.notify_all();
  });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Call call = begin("cudaEventQuery");
  if (call.code != cudaSuccess) return call.code;
  const std::lock_guard lock(event->state->mutex);
  return event->state->reached ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Call call = begin("cudaEventSynchronize");
  if (call.code != cudaSuccess) return call.code;
  std::unique_lock lock(event->state->mutex);
  event->state->changed.wait(lock, [&] { return event->state->reached; });
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  {
    Machine& m = machine();
    const std::lock_guard lock(m.mutex);
    const bool from_there = lies_in(m.device_memory, from, bytes), to_there = lies_in(m.device_memory, to, bytes);
    const bool from_here = lies_in(m.pinned, from, bytes), to_here = lies_in(m.pinned, to, bytes);
    const bool holds = kind == cudaMemcpyHostToDevice   ? from_here && to_there
                       : kind == cudaMemcpyDeviceToHost ? from_there && to_here
                                                        : from_there && to_there;
    if (!holds) return failed(cudaErrorInvalidValue);
    m.queued.uploads += kind == cudaMemcpyHostToDevice ? 1 : 0;
    m.queued.downloads += kind == cudaMemcpyDeviceToHost ? 1 : 0;
  }
  const std::size_t moved = bytes == static_cast<std::size_t>(number("STAND_IN_FLAW", -1)) ? bytes - 1 : bytes;
  return queue(stream, [=] { std::memcpy(to, from, moved); });
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return queue(stream, [=] { std::memset(to, value, bytes); });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return queue(stream, [=] { function(data); });
}

}  // extern "C"
