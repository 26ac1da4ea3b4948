// SPDX-License-Identifier: Apache-2.0
// Tells a missing file from one that could not be looked at. Both are I/O errors; only the first shows that a
// checkpoint is incomplete.
#pragma once

#include <atomic>
#include <utility>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

// How often a device or a server failed to answer in this process: an I/O error, a timeout, HTTP 500. Answers such as
// "not found" and "access denied" do not count.
inline std::atomic<Index> troubles{0};
// How often access to something that is there was denied.
inline std::atomic<Index> denials{0};

// Create it before looking at something, and ask it about the error. Troubles of other threads count too, so that an
// answer may be called unknown that is known, and never the other way round.
class TroubleWatch {
 public:
  // Returns whether a trouble may be the cause of `error`, so that the error shows nothing about what is stored.
  bool explains(const Error& error) const { return error.code() == ErrorCode::kIo && saw_any(); }

  // Returns the same if access that was denied may be the cause, too.
  bool hides(const Error& error) const {
    return error.code() == ErrorCode::kIo && (saw_any() || denials != denied_before_);
  }
  bool saw_any() const { return troubles != before_; }

 private:
  const Index before_ = troubles, denied_before_ = denials;
};

// Calls `look`, which returns a Status, for what is read only to say more than was asked for. Ignores its error unless
// a trouble may be the cause.
template <class Look>
Status look_if_possible(const Look& look) {
  const TroubleWatch watch;
  Status looked = look();
  return looked || !watch.explains(looked.error()) ? Status() : std::move(looked);
}

}  // namespace reshard
