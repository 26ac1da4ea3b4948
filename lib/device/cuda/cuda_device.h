// SPDX-License-Identifier: Apache-2.0
// NVIDIA GPUs as devices (device.h). Implemented by cuda_device.cc, or by cuda_absent.cc in a build without CUDA, which
// returns errors that say so.
#pragma once

#include <memory>
#include <string>

#include "lib/device/device.h"

namespace reshard {

// Returns "runtime 13.0, driver 13.0", or an error that says why no GPU can be used.
Result<std::string> cuda_version();

// Returns how many GPUs this process may use, at least one, or an error that says why there is none.
Result<int> count_cuda_devices();

// Opens the `ordinal`-th GPU, 0 <= ordinal < count. It allocates at most `memory_cap` bytes of its memory; 0: no cap.
Result<std::unique_ptr<Device>> open_cuda_device(int ordinal, Index memory_cap);

}  // namespace reshard
