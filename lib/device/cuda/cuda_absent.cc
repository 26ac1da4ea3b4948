// SPDX-License-Identifier: Apache-2.0
// Replaces the CUDA device in a build without CUDA.
#include "lib/device/cuda/cuda_device.h"

namespace reshard {

Result<int> count_cuda_devices() {
  return unsupported("cuda: reshard was built without CUDA; configure with -DRESHARD_CUDA=ON");
}

Result<std::string> cuda_version() { return std::move(count_cuda_devices()).error(); }

Result<std::unique_ptr<Device>> open_cuda_device(int, Index) { return std::move(count_cuda_devices()).error(); }

}  // namespace reshard
