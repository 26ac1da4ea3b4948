// SPDX-License-Identifier: Apache-2.0
// Rounds in which all ranks of a job read for each other; both exchanges (exchange.h, lib/load) run them.
//
//   1. Read round k + 1 into a sending buffer while the messages of round k are in flight.
//   2. Wait for the messages of round k.
//   3. Start the messages of round k + 1, and process what arrived in round k while they are in flight.
//
// Each rank needs four buffers on its device: one to send and one to receive, for each of two rounds. Only elements are
// sent, because every rank computes the messages of each round from metadata.
#pragma once

#include <vector>

#include "lib/device/device.h"
#include "lib/transport/transport.h"

namespace reshard {

// A range of the sending buffer that is sent to another rank, or of the receiving buffer that is received from one. Two
// ranks must list the messages between them in the same order.
struct RoundMessage {
  int peer = 0;
  Index offset = 0;
  Index bytes = 0;
};
struct RoundMessages {
  std::vector<RoundMessage> out, in;
};

// The work of one rank in each round. Two rounds are in flight at once and alternate between half 0 and half 1.
class Rounds {
 public:
  virtual ~Rounds() = default;
  // Fills `sent` with what the other ranks need in the next round and sets `messages`. Returns false if there is no
  // next round; all ranks must return false in the same round.
  virtual Result<bool> read(int half, const DeviceBuffer& sent, RoundMessages& messages) = 0;
  // Processes what was received in a round, while the messages of the next one are in flight.
  virtual Status finish(int half, const DeviceBuffer& sent, const DeviceBuffer& received) = 0;
};

// Returns the memory that a transport sends from and receives into.
inline MutableBytes moved(const Transport& data, const DeviceBuffer& buffer) {
  return data.moves_device_memory() ? buffer.device : buffer.host;
}

// Runs all rounds with buffers of `bytes` bytes. If another rank fails, messages may still arrive at any time, so their
// buffers are then never freed.
Status run_rounds(Rounds& rounds, Device& device, Transport& data, Index bytes);

}  // namespace reshard
