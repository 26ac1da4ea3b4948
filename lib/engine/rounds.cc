// SPDX-License-Identifier: Apache-2.0
#include "lib/engine/rounds.h"

#include <memory>
#include <mutex>
#include <utility>

namespace reshard {
namespace {

// Keeps memory that messages may still arrive in until the process ends.
void leave_behind(std::vector<std::unique_ptr<Device::Memory>> memory) {
  static std::mutex mutex;
  static auto* const left = new std::vector<std::unique_ptr<Device::Memory>>;  // never destroyed
  const std::lock_guard lock(mutex);
  for (auto& m : memory) left->push_back(std::move(m));
}

Result<std::unique_ptr<Transfer>> start(Transport& data, const RoundMessages& messages, const DeviceBuffer& sent,
                                        const DeviceBuffer& received) {
  const auto bytes = [&](const DeviceBuffer& buffer, const RoundMessage& m) {
    return moved(data, buffer.part(m.offset, m.bytes));
  };
  std::vector<Outgoing> out;
  std::vector<Incoming> in;
  for (const RoundMessage& m : messages.out) out.push_back({m.peer, bytes(sent, m)});
  for (const RoundMessage& m : messages.in) in.push_back({m.peer, bytes(received, m)});
  return data.start(std::move(out), std::move(in));
}

}  // namespace

Status run_rounds(Rounds& rounds, Device& device, Transport& data, Index bytes) {
  std::vector<std::unique_ptr<Device::Memory>> memory;
  for (int i = 0; i < 4; ++i) memory.push_back(TRY(device.allocate(bytes)));
  const DeviceBuffer sent[2] = {memory[0]->buffer(), memory[1]->buffer()};
  const DeviceBuffer received[2] = {memory[2]->buffer(), memory[3]->buffer()};
  std::unique_ptr<Transfer> under_way;
  const auto settle = [&]() -> Status {
    const auto transfer = std::move(under_way);
    Status done = transfer ? transfer->wait() : Status();
    if (!done) leave_behind(std::move(memory));
    return done;
  };
  const auto all = [&]() -> Status {
    bool more = true, is_first = true;
    for (int half = 0; more; half = 1 - half, is_first = false) {
      RoundMessages messages;
      more = TRY(rounds.read(half, sent[half], messages));
      TRY(settle());
      if (more) under_way = TRY(start(data, messages, sent[half], received[half]));
      if (!is_first) TRY(rounds.finish(1 - half, sent[1 - half], received[1 - half]));
    }
    return {};
  };
  Status status = all();
  if (!status) static_cast<void>(settle());
  return status;
}

}  // namespace reshard
