// The CPU as a device (device.h): the definition of what every other one does.
#pragma once

#include <memory>

#include "lib/device/device.h"

namespace reshard {

// One that gives out at most `memory_cap` bytes; 0: what there is.
std::unique_ptr<Device> make_cpu_device(Index memory_cap);

}  // namespace reshard
