// What all ranks do together, built on the transport's one operation. Every rank calls the same functions in the same
// order. With one rank, or a null transport, they return at once.
//
// What is combined goes up a binomial tree to rank 0 and comes down it again: about 2 log2(n) messages a rank.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "lib/base/checked.h"
#include "lib/transport/transport.h"

namespace reshard {

inline int rank_of(const Transport* ranks) { return ranks ? ranks->rank() : 0; }
inline int rank_count(const Transport* ranks) { return ranks ? ranks->size() : 1; }
inline bool is_stopped(const Transport* ranks) { return ranks && ranks->stopped(); }

// Sends and receives, and waits for both.
Status exchange(Transport& ranks, std::vector<Outgoing> out, std::vector<Incoming> in);

// Returns when every rank has called it.
Status barrier(Transport* ranks);

// Rank 0's bytes, everywhere.
Result<std::string> broadcast(Transport* ranks, std::string bytes);

// On rank 0 the bytes of each rank, in order; elsewhere nothing.
Result<std::vector<std::string>> gather(Transport* ranks, std::string_view mine);

// On rank 0 the values of all ranks, one rank's after the other's; elsewhere nothing. T is trivially copyable.
template <class T>
Result<std::vector<T>> gather_values(Transport* ranks, std::span<const T> mine) {
  const std::string_view bytes(reinterpret_cast<const char*>(mine.data()), mine.size_bytes());
  std::vector<T> out;
  for (const std::string& part : TRY(gather(ranks, bytes))) {
    const std::size_t n = part.size() / sizeof(T);
    out.resize(out.size() + n);
    if (n > 0) std::memcpy(out.data() + out.size() - n, part.data(), n * sizeof(T));
  }
  return out;
}

// Hands rank 0 the values of the others, a rank's after the other's, in stretches of at most 1 MiB, so that nobody
// holds them all. Elsewhere each(visit) tells this rank's: it calls visit(value) for each; on rank 0 take(value) is
// called. T is trivially copyable.
template <class T, class Each, class Take>
Status stream_values(Transport* ranks, const Each& each, const Take& take);

// Makes one of all ranks' bytes, as many on each: add(theirs) is to bring another rank's into `mine`. Returns with the
// same bytes everywhere. The order in which ranks are added is that of the tree.
Status combine(Transport* ranks, MutableBytes mine, const std::function<void(Bytes theirs)>& add);

// The same of values, one by one: add(mine, theirs). T is trivially copyable.
template <class T, class Add>
Status combine_values(Transport* ranks, std::span<T> mine, Add add) {
  return combine(ranks, std::as_writable_bytes(mine), [&](Bytes bytes) {
    for (std::size_t i = 0; i < mine.size(); ++i) {
      T theirs;
      std::memcpy(&theirs, bytes.data() + i * sizeof(T), sizeof(T));
      add(mine[i], theirs);
    }
  });
}

namespace internal {
// A stretch of values for rank 0; the last is empty.
Status send_stretch(Transport& ranks, Bytes bytes);
// The next stretch of a rank.
Result<std::vector<std::byte>> receive_stretch(Transport& ranks, int rank);
}  // namespace internal

template <class T, class Each, class Take>
Status stream_values(Transport* ranks, const Each& each, const Take& take) {
  constexpr std::size_t kStretch = (std::size_t{1} << 20) / sizeof(T);
  for (int r = 1; rank_of(ranks) == 0 && r < rank_count(ranks); ++r) {
    std::vector<std::byte> stretch;
    do {
      stretch = TRY(internal::receive_stretch(*ranks, r));
      for (std::size_t at = 0; at < stretch.size(); at += sizeof(T)) {
        T value;
        std::memcpy(&value, stretch.data() + at, sizeof(T));
        take(value);
      }
    } while (!stretch.empty());
  }
  if (rank_of(ranks) == 0) return {};
  Status status;
  std::vector<T> held;
  const auto send = [&] {
    if (status) status = internal::send_stretch(*ranks, std::as_bytes(std::span(held)));
    held.clear();
  };
  each([&](const T& value) {
    held.push_back(value);
    if (held.size() == kStretch) send();
  });
  if (!held.empty()) send();
  send();
  return status;
}

// The largest of all ranks' values at each place, in place. All ranks give equally many.
Status maximum(Transport* ranks, std::span<Index> values);

// The smallest of all ranks' values.
Result<Index> minimum(Transport* ranks, Index value);

// Whether all ranks have the same value.
Result<bool> all_equal(Transport* ranks, std::uint64_t value);

}  // namespace reshard
