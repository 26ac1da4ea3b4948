// Rounds in which all ranks of a job read for each other: what both exchanges (exchange.h, lib/load) have in
// common.
//
//     read round k+1 into a sending buffer   while the messages of round k travel   then finish round k
//
// Memory is four buffers a rank, on the device that the job is for: what is sent and what is received, of two rounds.
// Nothing but elements travels: every rank works out the messages of each round from metadata.
#pragma once

#include <vector>

#include "lib/device/device.h"
#include "lib/transport/transport.h"

namespace reshard {

// Bytes of the sending buffer that go to another rank, or of the receiving buffer that come from one. Between two ranks
// messages go in the same order on both sides.
struct RoundMessage {
  int peer = 0;
  Index offset = 0;
  Index bytes = 0;
};
struct RoundMessages {
  std::vector<RoundMessage> out, in;
};

// What a rank does in its rounds. Two are under way at once: those of half 0 and half 1 take turns.
class Rounds {
 public:
  virtual ~Rounds() = default;
  // Fills `sent` with what others need in the next round, and says what travels; false when there is no next round,
  // which all ranks must say at the same time.
  virtual Result<bool> read(int half, const DeviceBuffer& sent, RoundMessages& messages) = 0;
  // Uses what arrived in the round that read() began.
  virtual Status finish(int half, const DeviceBuffer& sent, const DeviceBuffer& received) = 0;
};

// Where the messages of a transport lie.
inline MutableBytes moved(const Transport& data, const DeviceBuffer& buffer) {
  return data.moves_device_memory() ? buffer.device : buffer.host;
}

// Runs all rounds, with buffers of `bytes` bytes. When others have failed, messages may arrive whenever they like: the
// memory that they are in is left to the process then.
Status run_rounds(Rounds& rounds, Device& device, Transport& data, Index bytes);

}  // namespace reshard
