// Which of two ways a conversion on many ranks should go.
//
// direct: each rank reads from the files what it writes. Nothing travels, but every rank opens the files that its part
// is scattered over, and reads it piece by piece. exchange: the files are dealt out over the ranks, each is read from
// end to end, and a byte goes to the rank that writes it over the network.
//
// Either way every byte is read once and written once: that is left out here, as it decides nothing. What is counted is
// what the ways differ in. Its price is estimated and not measured (docs/cluster.md), and so are the seconds.
#pragma once

#include <string>
#include <string_view>

#include "lib/plan/plan.h"

namespace reshard {

enum class Strategy { kDirect, kExchange };
std::string_view strategy_name(Strategy strategy);  // "direct"

// What the busiest rank does beyond reading and writing each of its bytes once.
struct StrategyCost {
  Index reads = 0;        // calls
  Index opens = 0;        // files
  Index total_opens = 0;  // by all ranks
  Index bytes_sent = 0;   // to other ranks; it receives as many
  double seconds = 0;     // an estimate
};
std::string to_string(const StrategyCost& cost);  // "0.2 s for 1,130 reads of 64 files and 2.5 GB sent"

struct StrategyChoice {
  Strategy strategy = Strategy::kDirect;
  StrategyCost direct, exchange;
  std::string reason;  // a clause
};
// The way that costs less; direct where they are equal. `ranks` is at least 1; with `one_machine` they share its disk
// and its memory, else a file system and a network. One pass over the source's fragments.
StrategyChoice choose_strategy(const Plan& plan, const Catalog& source, Index ranks, bool one_machine);

}  // namespace reshard
