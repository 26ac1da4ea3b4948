// SPDX-License-Identifier: Apache-2.0
// Collective operations, built on the transport's single operation. Every rank must call the same functions in the same
// order. With one rank, or a null transport, they return at once.
//
// Reductions go up a binomial tree to rank 0 and the result comes back down: about 2 log2(n) messages per rank.
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

// Sends and receives messages and waits for both.
Status exchange(Transport& ranks, std::vector<Outgoing> out, std::vector<Incoming> in);

// Returns once every rank has called it.
Status barrier(Transport* ranks);

// Returns rank 0's bytes on every rank.
Result<std::string> broadcast(Transport* ranks, std::string bytes);

// Returns the bytes of each rank, in rank order, on rank 0; nothing elsewhere.
Result<std::vector<std::string>> gather(Transport* ranks, std::string_view mine);

// Returns the concatenated values of all ranks, in rank order, on rank 0; nothing elsewhere. T is trivially copyable.
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

// Streams the values of all other ranks to rank 0, rank by rank, in messages of at most 1 MiB, so that no rank holds
// them all. On the other ranks each(visit) must call visit(value) for each of the rank's values; rank 0 calls
// take(value) for each value received. T is trivially copyable.
template <class T, class Each, class Take>
Status stream_values(Transport* ranks, const Each& each, const Take& take);

// Reduces all ranks' bytes, the same number on each, into `mine`. add(theirs) must combine another rank's bytes with
// `mine`. Every rank ends with the same bytes. Ranks are combined in the order of the tree.
Status combine(Transport* ranks, MutableBytes mine, const std::function<void(Bytes theirs)>& add);

// Reduces values element by element with add(mine, theirs). T is trivially copyable.
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
// Sends one message of values to rank 0; an empty one is the last.
Status send_stretch(Transport& ranks, Bytes bytes);
// Receives a rank's next message.
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

// Replaces each element by its maximum over all ranks. All ranks must pass the same number of values.
Status maximum(Transport* ranks, std::span<Index> values);

// Returns the minimum over all ranks.
Result<Index> minimum(Transport* ranks, Index value);

// Returns whether all ranks have the same value.
Result<bool> all_equal(Transport* ranks, std::uint64_t value);

}  // namespace reshard
