// How bytes reach another rank: one operation, moving messages whose lengths both sides know.
//
// A rank is one process of a job (MPI), or one thread of a test (local). Every rank makes the same plan, so it knows
// what it sends to whom and what it gets from whom; no length ever travels. What ranks do together beside that
// (agreeing on a number, adding up digests) is built on this operation in collectives.h.
//
// When one rank fails, the job is over for all: wait() returns an error on the others, and stopped() says so to those
// that are busy elsewhere. Who noticed, and who says what to the user, is the business of the job (job.h).
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

// Messages under way.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Returns when all of this rank's messages are sent and received, or with an error of code kPeer when the job is
  // over.
  virtual Status wait() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;  // 0 .. size() - 1
  virtual int size() const = 0;

  // Starts moving messages, which may be longer than 2 GiB. Between two ranks they arrive in the order in which both
  // list them, and each incoming one is as long as its outgoing counterpart; empty ones are left out on both sides. A
  // peer is another rank, never this one. The memory is the caller's and stays untouched until wait() has returned. All
  // ranks start their transfers in the same order; several may be under way.
  virtual Result<std::unique_ptr<Transfer>> start(std::vector<Outgoing> out, std::vector<Incoming> in) = 0;

  // Whether messages lie in memory of the device; otherwise in the host's.
  virtual bool moves_device_memory() const { return false; }

  // Whether the job is over because a rank failed. Thread-safe.
  virtual bool stopped() const = 0;
};

}  // namespace reshard
