// SPDX-License-Identifier: Apache-2.0
// How transports wait: by polling, so that a waiting rank learns that the job is over.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "lib/base/result.h"

namespace reshard {

// Returns the error of a wait that ends because another rank failed. The job (job.h) reports that rank's own error.
inline Error job_is_over() { return {ErrorCode::kPeer, "another rank failed"}; }

// Sleeps between polls: at first it only yields, later up to half a millisecond.
class Pause {
 public:
  void operator()() {
    if (looks_ < kQuick) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(looks_));
    }
    looks_ = std::min(looks_ + 1, kLongest);
  }

 private:
  static constexpr int kQuick = 50, kLongest = 500;
  int looks_ = 0;
};

}  // namespace reshard
