// SPDX-License-Identifier: Apache-2.0
// Tracks the memory that a device has allocated, against a cap. Shared by the device and its memory, which may outlive
// it.
#pragma once

#include <atomic>
#include <string>

#include "lib/base/checked.h"
#include "lib/base/result.h"
#include "lib/base/text.h"

namespace reshard {

class Budget {
 public:
  // `cap` is in bytes, 0 for none. `device` names the device in errors.
  Budget(std::string device, Index cap) : device_(std::move(device)), cap_(cap) {}

  // Reserves `bytes` (>= 0), or returns an error that says how much is left. Thread-safe, like give().
  Status take(Index bytes) {
    Index taken = taken_;
    do {
      if (cap_ > 0 && bytes > cap_ - taken)
        return io_error(device_ + ": memory: expected at most " + human_bytes(cap_ - taken) + " more of the " +
                        human_bytes(cap_) + " allowed, got a request for " + human_bytes(bytes));
    } while (!taken_.compare_exchange_weak(taken, taken + bytes));
    return {};
  }
  void give(Index bytes) { taken_ -= bytes; }

 private:
  std::string device_;
  Index cap_;
  std::atomic<Index> taken_{0};
};

}  // namespace reshard
