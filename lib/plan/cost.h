// What a job on many ranks costs, and which of two ways it should go.
//
// direct: each rank reads from the files what it writes or holds. Nothing travels, but what several ranks hold is read
// by each of them, a narrow column of a tensor is read together with its neighbours, and every rank opens the files
// that its part is scattered over. exchange: the files are dealt out over the ranks, each byte is read once, in long
// runs, and goes to the rank that needs it over the network.
//
// This is a model: bytes over bandwidths, and counts times latencies. It ranks the two ways and says why; it promises
// no wall time (docs/scaling.md).
#pragma once

#include <string>
#include <string_view>

#include "lib/plan/plan.h"

namespace reshard {

enum class Strategy { kDirect, kExchange };
std::string_view strategy_name(Strategy strategy);  // "direct"

// What the ranks do in one of the two ways. "A rank" is the busiest one.
struct Work {
  Index bytes_read = 0;           // from files, by a rank; neighbours that are read along count
  Index total_bytes_read = 0;     // by all ranks
  Index requests = 0;             // reads, by a rank
  Index opens = 0;                // files, by a rank
  Index total_opens = 0;          // by all ranks
  Index bytes_sent = 0;           // to other ranks, by a rank
  Index bytes_received = 0;       // from other ranks, by a rank
  Index messages = 0;             // received by a rank
  Index bytes_written = 0;        // to files, by a rank; 0 where ranks keep what they have
  Index total_bytes_written = 0;  // by all ranks
};

struct JobWork {
  Index ranks = 1;
  Index source_bytes = 0;  // what is needed of the source, each byte once
  Work direct, exchange;
};

// What the model believes of the machines; bytes and counts a second, seconds. The defaults are those of a shared file
// system and one network link a rank; docs/scaling.md says where each comes from.
struct CostParameters {
  double rank_read = 3e9;           // one rank's reading of long runs
  double rank_write = 2.7e9;        // one rank's writing of a new file
  double file_system = 40e9;        // all ranks' reading together, and their writing
  double request = 33e-6;           // each read, with several in flight
  double open = 200e-6;             // each file a rank opens
  double file_system_opens = 50e3;  // all ranks' opens a second
  double network = 12e9;            // what a rank sends, and what it receives at the same time
  double message = 20e-6;           // each message
  double copy = 8e9;                // packing what is sent, and unpacking what is received

  // All ranks on one machine: one disk, and memory for a network, which `ranks` share.
  static CostParameters one_machine(Index ranks);
};

// Seconds of each kind, one after the other.
struct Estimate {
  double read = 0;     // requests and opens included
  double traffic = 0;  // the slower direction
  double copies = 0;   // packing and unpacking
  double write = 0;

  double seconds() const { return read + traffic + copies + write; }  // when nothing overlaps
  double slowest() const;                                             // when everything does
};
std::string to_string(const Estimate& estimate);  // "2.4 s (read 1.2 s, traffic 0.3 s, copies 0.1 s, write 0.8 s)"

Estimate estimate(const Work& work, const CostParameters& parameters);

struct Choice {
  Strategy strategy = Strategy::kDirect;
  Estimate direct, exchange;
  std::string reason;  // a clause: "every byte is read once either way, and nothing has to travel"
};
// The way that takes less time when nothing overlaps; direct where they are equal. One rank has nobody to exchange
// with.
Choice choose(const JobWork& work, const CostParameters& parameters = {});

// What the ranks' units of work are.
enum class JobKind {
  kConvert,  // boxes of whole rows, dealt out evenly: a rank reads each byte of its boxes once, and writes all copies
  kLoad,     // the target's fragments and replicas, each in the memory of a rank: all of them are read, none is written
};

// Counts the work of a plan between two catalogs on `ranks` ranks (at least 1), in one pass over the fragments (for
// kLoad, over the moves of tensors that are cut in different ways); runs are never enumerated. Where the catalogs do
// not say which rank has what, it is an estimate: ranks have equal shares, and of what a rank needs in an exchange it
// has read one byte of `ranks` itself.
JobWork job_work(const Plan& plan, const Catalog& source, const Catalog& target, Index ranks, JobKind job);

}  // namespace reshard
