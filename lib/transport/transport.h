// SPDX-License-Identifier: Apache-2.0
// A transport moves bytes between ranks. It has a single operation: messages whose lengths both sides know.
//
// A rank is one process of a job (MPI) or one thread of a test (local). All ranks compute the same plan, so each knows
// what it sends and receives, and lengths are never transmitted. Other collective operations (agreeing on a number,
// summing digests) are built on this one in collectives.h.
//
// If one rank fails, the job is over for all: wait() returns an error on the others, and stopped() tells those that are
// busy elsewhere. The job (job.h) detects failures and reports them to the user.
#pragma once

#include <memory>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/base/result.h"

namespace reshard {

struct Outgoing {
  int peer = 0;
  Bytes bytes;
};
struct Incoming {
  int peer = 0;
  MutableBytes bytes;
};

// Messages in flight.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Returns once all of this rank's messages are sent and received, or with an error of code kPeer if the job is over.
  virtual Status wait() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;  // 0 .. size() - 1
  virtual int size() const = 0;

  // Starts moving messages, which may exceed 2 GiB. Messages between two ranks match in the order in which both list
  // them, and each must be as long as its counterpart; both sides leave out empty ones. A peer must be another rank.
  // The caller owns the memory and must not touch it until wait() has returned. All ranks must start their transfers in
  // the same order; several may be in flight.
  virtual Result<std::unique_ptr<Transfer>> start(std::vector<Outgoing> out, std::vector<Incoming> in) = 0;

  // Returns whether messages are in device memory instead of host memory.
  virtual bool moves_device_memory() const { return false; }

  // Returns whether the job is over because a rank failed. Thread-safe.
  virtual bool stopped() const = 0;
};

}  // namespace reshard
