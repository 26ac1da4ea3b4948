// SPDX-License-Identifier: Apache-2.0
// Distinguishes a missing file from one that could not be read because a device or a server failed. Both are I/O
// errors, but only the first shows that a checkpoint is incomplete.
#pragma once

#include <atomic>
#include <utility>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

// How often a device, a server or the process itself failed: an I/O error, a timeout, HTTP 500, too many open files.
// Answers such as "not found" and "access denied" do not count.
inline std::atomic<Index> io_failures{0};
// How often access to something that exists was denied.
inline std::atomic<Index> access_denials{0};

// Create it before an operation, and ask it about the operation's error. Failures in other threads count too: the watch
// may doubt an error that is right, but never trusts one that a failure caused.
class IoFailureWatch {
 public:
  // Returns whether an I/O failure since construction may have caused `error`, so that it does not prove that something
  // is missing or damaged.
  bool may_be_io_failure(const Error& error) const { return error.code() == ErrorCode::kIo && saw_failure(); }

  // As above, or whether a denied access since construction may have caused `error`.
  bool may_be_io_failure_or_denial(const Error& error) const {
    return error.code() == ErrorCode::kIo && (saw_failure() || access_denials != denials_before_);
  }
  bool saw_failure() const { return io_failures != failures_before_; }

 private:
  const Index failures_before_ = io_failures, denials_before_ = access_denials;
};

// Runs an optional look-up, whose result the caller can do without. Ignores its error unless an I/O failure may have
// caused it, because the same checkpoint must not be described differently after such a failure.
template <class Look>
Status look_if_possible(const Look& look) {
  const IoFailureWatch watch;
  Status looked = look();
  return looked || !watch.may_be_io_failure(looked.error()) ? Status() : std::move(looked);
}

}  // namespace reshard
