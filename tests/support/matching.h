// Matches the sending and receiving ends of messages between ranks of one process, in whichever order they arrive. The
// caller moves the bytes.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/result.h"
#include "lib/transport/transport.h"

namespace reshard {

// A message, identified by its sender, its receiver and its number between the two. State is the caller's data about
// it.
template <class State>
struct MatchedMessage {
  Bytes from;
  MutableBytes to;
  State state;
};

template <class State>
class Matcher {
 public:
  using Message = std::shared_ptr<MatchedMessage<State>>;
  struct Ends {
    std::vector<Message> mine;      // one per non-empty message that the rank started
    std::vector<Message> complete;  // messages that now have both ends, in the order in which they were started
  };

  // Adds the messages that `rank` of `size` sends and receives. Fails if the two ends of a message differ in length or
  // a peer does not exist. Not thread-safe.
  Result<Ends> add(int rank, int size, const std::vector<Outgoing>& out, const std::vector<Incoming>& in) {
    Ends ends;
    for (const Outgoing& message : out)
      if (!message.bytes.empty()) TRY(add_end(rank, message.peer, size, message.bytes, {}, ends));
    for (const Incoming& message : in)
      if (!message.bytes.empty()) TRY(add_end(message.peer, rank, size, {}, message.bytes, ends));
    return ends;
  }

 private:
  // A pair of ranks: the number of messages started at each end, and the messages with only one end so far.
  struct Line {
    Index sent = 0, wanted = 0;
    std::map<Index, Message> open;
  };

  Status add_end(int sender, int receiver, int size, Bytes from, MutableBytes to, Ends& ends) {
    if (sender == receiver || std::min(sender, receiver) < 0 || std::max(sender, receiver) >= size)
      return internal_error("a message from rank " + std::to_string(sender) + " to rank " + std::to_string(receiver) +
                            " of " + std::to_string(size));
    Line& line = lines_[{sender, receiver}];
    const Index number = from.empty() ? line.wanted++ : line.sent++;
    Message& message = line.open[number];
    const bool first = message == nullptr;
    if (first) message = std::make_shared<MatchedMessage<State>>();
    if (!from.empty()) message->from = from;
    if (!to.empty()) message->to = to;
    ends.mine.push_back(message);
    if (first) return {};
    if (message->from.size() != message->to.size())
      return internal_error("rank " + std::to_string(sender) + " sent " + std::to_string(message->from.size()) +
                            " bytes where rank " + std::to_string(receiver) + " expected " +
                            std::to_string(message->to.size()));
    ends.complete.push_back(message);
    line.open.erase(number);
    return {};
  }

  std::map<std::pair<int, int>, Line> lines_;
};

}  // namespace reshard
