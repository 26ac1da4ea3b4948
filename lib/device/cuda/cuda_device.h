// GPUs of NVIDIA as devices (device.h). Implemented by cuda_device.cc, or by cuda_absent.cc where this program is built
// without CUDA: it counts no GPU, and says why.
#pragma once

#include <memory>
#include <string>

#include "lib/device/device.h"

namespace reshard {

// "runtime 13.0, driver 13.0"; an error says why no GPU can be used.
Result<std::string> cuda_version();

// How many GPUs this process may use, at least one; else an error that says why there is none.
Result<int> count_cuda_devices();

// The `ordinal`-th of them, 0 <= ordinal < count. Gives out at most `memory_cap` bytes of its memory; 0: what it has.
Result<std::unique_ptr<Device>> open_cuda_device(int ordinal, Index memory_cap);

}  // namespace reshard
