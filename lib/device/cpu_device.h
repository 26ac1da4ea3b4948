// SPDX-License-Identifier: Apache-2.0
// The CPU as a device (device.h). It defines the results of all others.
#pragma once

#include <memory>

#include "lib/device/device.h"

namespace reshard {

// Returns a CPU device that allocates at most `memory_cap` bytes; 0 means no cap.
std::unique_ptr<Device> make_cpu_device(Index memory_cap);

}  // namespace reshard
