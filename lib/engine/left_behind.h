// Memory in which messages of a job that failed may still arrive: it stays until the process ends.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "lib/device/device.h"

namespace reshard {

inline void leave_behind(std::vector<std::unique_ptr<Device::Memory>> memory) {
  static std::mutex mutex;
  static auto* const left = new std::vector<std::unique_ptr<Device::Memory>>;  // never destroyed
  const std::lock_guard lock(mutex);
  for (auto& m : memory)
    if (m) left->push_back(std::move(m));
}

}  // namespace reshard
