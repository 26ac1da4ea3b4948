// SPDX-License-Identifier: Apache-2.0
// The schedule of a load in which ranks work together: what each rank reads and receives in each round.
//
// All slabs of all tensors form one list, in the order of the plan. Each rank reads a contiguous part of the list,
// equal in bytes (SlabList::shares), so that a stored item is mostly read by one rank sequentially. In a round each
// rank reads as many slabs of its part as fit into its buffer and into the buffers of the receivers. Every rank
// computes the rounds of all ranks from metadata alone, so that no message has to be announced.
#pragma once

#include <vector>

#include "lib/checkpoint/fragment_index.h"
#include "lib/engine/rounds.h"
#include "lib/engine/slabs.h"
#include "lib/load/memory_target.h"

namespace reshard {

// What one rank does in a round. Slabs are packed for sending part by part, and a part piece by piece, each row-major
// in the target's dtype. Offsets are in bytes in the sending or receiving buffer. Data for the same ranks is contiguous
// there, so that it is one message to each of them.
struct ExchangeRound {
  struct Packing {
    std::vector<Box> pieces;
    Index offset = 0;  // in the sending buffer
  };
  struct Read {
    std::size_t planned = 0;  // index in the plan
    Box slab;
    std::vector<Packing> parts;
  };
  struct Arrival {
    std::size_t planned = 0;
    std::vector<Box> pieces;
    bool is_own = false;  // it is in this rank's sending buffer
    Index offset = 0;
    Index bytes = 0;
  };
  std::vector<Read> reads;
  RoundMessages messages;
  std::vector<Arrival> arrivals;
  Index sent_bytes = 0;  // bytes used in the sending buffer
  Index received_bytes = 0;
};

class ExchangeSchedule {
 public:
  // `slabs` are those of the planned tensors, one item each. `limit` is the size of each buffer, in bytes; no slab may
  // exceed it. Everything but the list must outlive this object.
  ExchangeSchedule(const Plan& plan, const Catalog& target_view, const MemoryTarget& target, SlabList slabs, int rank,
                   Index limit);

  // Computes this rank's next round, which may be empty. Returns false if there is none.
  bool next(ExchangeRound& round);

 private:
  // The part of a slab that a first replica and its copies hold.
  struct Part {
    std::uint32_t file = 0;
    std::vector<Box> pieces;
    Index elements = 0;
  };
  std::vector<Part> cut(std::size_t planned, const Box& slab) const;
  bool fits(const std::vector<Part>& parts, std::size_t planned, int reader) const;
  // A slab that a rank reads in this round.
  struct ReadSlab {
    int reader = 0;
    std::size_t planned = 0;
    Box slab;
    std::vector<Part> parts;
  };
  // Lets a rank read one more slab if there is room. Returns false if it reads no more in this round.
  bool take_next(int reader, std::vector<ReadSlab>& taken);
  // Assigns the receivers of what a rank reads, and its offsets in that rank's buffer and in this rank's.
  void lay_out(const std::vector<ReadSlab>& taken, int reader, ExchangeRound& round);
  Index element_bytes(std::size_t planned) const;
  const std::vector<Index>& steps(std::size_t planned) const { return target_.replica_steps_of(tensor_[planned]); }

  const Plan& plan_;
  const Catalog& target_view_;
  const MemoryTarget& target_;
  SlabList slabs_;
  int rank_, ranks_;
  Index limit_;
  std::vector<FragmentIndex> indexes_;  // one for each planned tensor
  std::vector<std::size_t> tensor_;     // of each planned tensor: its index in the target's catalog
  std::vector<Index> next_, end_;       // slabs of each rank's part of the list
  std::vector<Index> sent_, received_;  // bytes of each rank in this round
  int first_ = 0;                       // the rank that chooses first; rotates
};

}  // namespace reshard
