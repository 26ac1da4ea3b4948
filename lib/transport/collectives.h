// What all ranks do together, built on the transport's one operation. Every rank calls the same functions in the same
// order. With one rank, or a null transport, they return at once.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lib/base/checked.h"
#include "lib/transport/transport.h"

namespace reshard {

inline int rank_of(const Transport* ranks) { return ranks ? ranks->rank() : 0; }
inline int rank_count(const Transport* ranks) { return ranks ? ranks->size() : 1; }

// Returns when every rank has called it.
Status barrier(Transport* ranks);

// Rank 0's bytes, everywhere.
Result<std::string> broadcast(Transport* ranks, std::string bytes);

// On rank 0 the bytes of each rank, in order; elsewhere nothing.
Result<std::vector<std::string>> gather(Transport* ranks, std::string_view mine);

// Sums modulo 2^32, in place, the same on every rank. All ranks give equally many.
Status sum(Transport* ranks, std::span<std::uint32_t> values);

// The largest of all ranks' values at each place, in place. All ranks give equally many.
Status maximum(Transport* ranks, std::span<Index> values);

// The smallest of all ranks' values.
Result<Index> minimum(Transport* ranks, Index value);

}  // namespace reshard
