// How transports wait: by looking again and again, so that whoever waits still hears that the job is over.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "lib/base/result.h"

namespace reshard {

// What a wait ends with when another rank failed: its own error is told by the job (job.h).
inline Error job_is_over() { return {ErrorCode::kPeer, "another rank failed"}; }

// Sleeps between looks: hardly at first, up to half a millisecond later.
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
