// SPDX-License-Identifier: Apache-2.0
#include "lib/device/cuda/context.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "lib/device/cuda/cuda_device.h"

namespace reshard {
namespace {

// The driver's functions that are used. They are looked up through the runtime, so that nothing is linked that a
// machine without a GPU lacks.
struct Driver {
  decltype(&::cuDeviceGet) device = nullptr;
  decltype(&::cuDevicePrimaryCtxRetain) retain = nullptr;
  decltype(&::cuDevicePrimaryCtxRelease) release = nullptr;
  decltype(&::cuCtxPushCurrent) push = nullptr;
  decltype(&::cuCtxPopCurrent) pop = nullptr;
};

template <class Function>
Status find(const char* name, Function& out) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t code = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault,
                                                            &result);  // the oldest supported version
#else
  const cudaError_t code = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (code != cudaSuccess || result != cudaDriverEntryPointSuccess || !found) {
    static_cast<void>(cudaGetLastError());
    return unsupported(std::string("cuda: the driver has no ") + name + "; expected a driver for CUDA 12 or newer");
  }
  out = reinterpret_cast<Function>(found);
  return {};
}

Result<Driver> find_driver() {
  Driver out;
  TRY(find("cuDeviceGet", out.device));
  TRY(find("cuDevicePrimaryCtxRetain", out.retain));
  TRY(find("cuDevicePrimaryCtxRelease", out.release));
  TRY(find("cuCtxPushCurrent", out.push));
  TRY(find("cuCtxPopCurrent", out.pop));
  return out;
}

// Never destroyed: an NCCL call that was blocked may return to it after the program has ended.
const Result<Driver>& driver() {
  static const auto* const found = new Result<Driver>(find_driver());
  return *found;
}

}  // namespace

Status cuda_status(int ordinal, int code, const std::string& doing) {
  if (code == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());
  return io_error("cuda:" + std::to_string(ordinal) + ": " + doing + ": " +
                  cudaGetErrorString(static_cast<cudaError_t>(code)));
}

Result<std::shared_ptr<const CudaContext>> CudaContext::retain(int ordinal) {
  TRY(count_cuda_devices());  // reports a missing driver
  if (!driver()) return driver().error();
  CUdevice device = 0;
  CUcontext context = nullptr;
  // The driver's error codes equal the runtime's.
  TRY(cuda_status(ordinal, driver()->device(&device, ordinal), "finding the device"));
  TRY(cuda_status(ordinal, driver()->retain(&context, device), "creating its context"));
  std::shared_ptr<const CudaContext> out(new CudaContext(ordinal, device, context));
  int current = -1;
  TRY(out->run("making it current", [&] { return cudaGetDevice(&current); }));
  if (current != ordinal)
    return internal_error("cuda:" + std::to_string(ordinal) + ": making it current: expected device " +
                          std::to_string(ordinal) + ", got " + std::to_string(current));
  return out;
}

CudaContext::~CudaContext() { static_cast<void>(driver()->release(device_)); }

CudaContext::Current::Current(const CudaContext& context) : error_(driver()->push(context.context_)) {}

CudaContext::Current::~Current() {
  CUcontext ours = nullptr;
  if (error_ == 0) static_cast<void>(driver()->pop(&ours));
}

}  // namespace reshard
