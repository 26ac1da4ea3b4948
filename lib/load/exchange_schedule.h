// Who reads what in a load in which ranks work together, and who gets it, round by round.
//
// All slabs of all tensors stand in one list, in the order of the plan. Each rank reads a stretch of it, equal in bytes
// (SlabList::shares), so that stored items are mostly read by one rank from end to end. In a round each rank reads as
// many slabs of its stretch as its buffer holds and as those who get them have room for. Every rank works out the
// rounds of all ranks, from metadata alone, so that nobody has to say what is coming.
#pragma once

#include <vector>

#include "lib/checkpoint/fragment_index.h"
#include "lib/engine/rounds.h"
#include "lib/engine/slabs.h"
#include "lib/load/memory_target.h"

namespace reshard {

// What one rank does in a round. Slabs are packed for sending part by part, a part piece by piece, each row-major in
// the target's dtype; offsets are bytes in the buffer that a rank sends from, or in the one it receives into. What goes
// to the same ranks lies together there, so that it is one message to each of them.
struct ExchangeRound {
  struct Packing {
    std::vector<Box> pieces;
    Index offset = 0;  // in the sending buffer
  };
  struct Read {
    std::size_t planned = 0;  // a tensor of the plan
    Box slab;
    std::vector<Packing> parts;
  };
  struct Arrival {
    std::size_t planned = 0;
    std::vector<Box> pieces;
    bool is_own = false;  // it lies in the sending buffer
    Index offset = 0;
    Index bytes = 0;
  };
  std::vector<Read> reads;
  RoundMessages messages;
  std::vector<Arrival> arrivals;
  Index sent_bytes = 0;  // that the sending buffer holds
  Index received_bytes = 0;
};

class ExchangeSchedule {
 public:
  // `slabs` are those of the planned tensors, one item each. `limit` is the size of either buffer, which no slab
  // exceeds. Refers to all but the list.
  ExchangeSchedule(const Plan& plan, const Catalog& target_view, const MemoryTarget& target, SlabList slabs, int rank,
                   Index limit);

  // The next round of this rank; false when there is none. It may be empty on some ranks.
  bool next(ExchangeRound& round);

 private:
  // What one first replica and its copies hold of a slab.
  struct Part {
    std::uint32_t file = 0;
    std::vector<Box> pieces;
    Index elements = 0;
  };
  std::vector<Part> cut(std::size_t planned, const Box& slab) const;
  bool fits(const std::vector<Part>& parts, std::size_t planned, int reader) const;
  // A slab that a rank reads in this round.
  struct Taken {
    int reader = 0;
    std::size_t planned = 0;
    Box slab;
    std::vector<Part> parts;
  };
  // Lets a rank read one more slab, if there is room; false when it reads no more in this round.
  bool take_next(int reader, std::vector<Taken>& taken);
  // Says where what a rank reads lies in its buffer, and in this rank's, and who gets it.
  void lay_out(const std::vector<Taken>& taken, int reader, ExchangeRound& round);
  Index element_bytes(std::size_t planned) const;
  const std::vector<Index>& steps(std::size_t planned) const { return target_.replica_steps_of(tensor_[planned]); }

  const Plan& plan_;
  const Catalog& target_view_;
  const MemoryTarget& target_;
  SlabList slabs_;
  int rank_, ranks_;
  Index limit_;
  std::vector<FragmentIndex> indexes_;  // of the planned tensors
  std::vector<std::size_t> tensor_;     // of the target's catalog, which each is part of
  std::vector<Index> next_, end_;       // slabs, of each rank's stretch
  std::vector<Index> sent_, received_;  // bytes of each rank in this round
  int first_ = 0;                       // the rank that chooses first, which goes round
};

}  // namespace reshard
