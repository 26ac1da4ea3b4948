// SPDX-License-Identifier: Apache-2.0
// Chooses between two strategies for a conversion on many ranks.
//
// direct: each rank reads from the files what it writes. Nothing is sent, but every rank opens all files over which its
// part is scattered and reads it piece by piece. exchange: the files are divided among the ranks, each file is read
// sequentially, and bytes are sent over the network to the rank that writes them.
//
// Either way every byte is read once and written once, so that cost is left out; only the differences are counted.
// Costs and seconds are estimates, not measurements (docs/cluster.md).
#pragma once

#include <string>
#include <string_view>

#include "lib/plan/plan.h"

namespace reshard {

enum class Strategy { kDirect, kExchange };
std::string_view strategy_name(Strategy strategy);  // "direct"

// The cost for the busiest rank, beyond reading and writing each of its bytes once.
struct StrategyCost {
  Index reads = 0;        // read calls
  Index opens = 0;        // files opened
  Index total_opens = 0;  // files opened by all ranks
  Index bytes_sent = 0;   // to other ranks; it receives as many
  double seconds = 0;     // an estimate
};
std::string to_string(const StrategyCost& cost);  // "0.2 s for 1,130 reads of 64 files and 2.5 GB sent"

struct StrategyChoice {
  Strategy strategy = Strategy::kDirect;
  StrategyCost direct, exchange;
  std::string reason;  // a clause
};
// Returns the strategy that costs less, or direct if they are equal. `ranks` must be at least 1. With `one_machine` the
// ranks share a disk and memory, otherwise a file system and a network. Takes one pass over the source's fragments.
StrategyChoice choose_strategy(const Plan& plan, const Catalog& source, Index ranks, bool one_machine);

}  // namespace reshard
