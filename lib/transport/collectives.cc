// SPDX-License-Identifier: Apache-2.0
#include "lib/transport/collectives.h"

#include <algorithm>
#include <utility>

namespace reshard {
namespace {

// This rank's position in a binomial tree rooted at rank 0. A parent is the rank with the lowest set bit cleared.
struct Tree {
  int parent = -1;
  std::vector<int> children;
};
Tree tree_of(const Transport& ranks) {
  Tree out;
  for (int bit = 1; bit < ranks.size(); bit <<= 1) {
    if (ranks.rank() & bit) {
      out.parent = ranks.rank() - bit;
      break;
    }
    if (ranks.rank() + bit < ranks.size()) out.children.push_back(ranks.rank() + bit);
  }
  return out;
}

// Sends rank 0's bytes down the tree, in place.
Status spread(Transport& ranks, MutableBytes bytes) {
  const Tree tree = tree_of(ranks);
  if (tree.parent >= 0) TRY(exchange(ranks, {}, {{tree.parent, bytes}}));
  std::vector<Outgoing> out;
  for (const int child : tree.children) out.push_back({child, bytes});
  return exchange(ranks, std::move(out), {});
}

}  // namespace

Status exchange(Transport& ranks, std::vector<Outgoing> out, std::vector<Incoming> in) {
  const auto transfer = TRY(ranks.start(std::move(out), std::move(in)));
  return transfer->wait();
}

Status barrier(Transport* ranks) {
  Index nothing[1] = {0};
  return maximum(ranks, nothing);
}

Result<std::string> broadcast(Transport* ranks, std::string bytes) {
  if (rank_count(ranks) == 1) return bytes;
  Index size[1] = {std::ssize(bytes)};
  TRY(spread(*ranks, std::as_writable_bytes(std::span(size))));
  bytes.resize(size[0]);
  TRY(spread(*ranks, std::as_writable_bytes(std::span(bytes))));
  return bytes;
}

Result<std::vector<std::string>> gather(Transport* ranks, std::string_view mine) {
  if (rank_count(ranks) == 1) return std::vector<std::string>{std::string(mine)};
  const Index size[1] = {std::ssize(mine)};
  const Bytes size_bytes = std::as_bytes(std::span(size)), bytes = std::as_bytes(std::span(mine));
  std::vector<std::string> out;
  if (ranks->rank() > 0) {
    TRY(exchange(*ranks, {{0, size_bytes}}, {}));
    TRY(exchange(*ranks, {{0, bytes}}, {}));
    return out;
  }
  const std::size_t n = ranks->size();
  std::vector<Index> sizes(n, size[0]);
  std::vector<Incoming> in;
  for (std::size_t r = 1; r < n; ++r)
    in.push_back({static_cast<int>(r), std::as_writable_bytes(std::span(&sizes[r], 1))});
  TRY(exchange(*ranks, {}, std::exchange(in, {})));
  out.resize(n);
  out[0] = mine;
  for (std::size_t r = 1; r < n; ++r) {
    out[r].resize(sizes[r]);
    in.push_back({static_cast<int>(r), std::as_writable_bytes(std::span(out[r]))});
  }
  TRY(exchange(*ranks, {}, std::move(in)));
  return out;
}

Status internal::send_stretch(Transport& ranks, Bytes bytes) {
  const Index size[1] = {std::ssize(bytes)};
  TRY(exchange(ranks, {{0, std::as_bytes(std::span(size))}}, {}));
  return bytes.empty() ? Status() : exchange(ranks, {{0, bytes}}, {});
}

Result<std::vector<std::byte>> internal::receive_stretch(Transport& ranks, int rank) {
  Index size[1] = {0};
  TRY(exchange(ranks, {}, {{rank, std::as_writable_bytes(std::span(size))}}));
  std::vector<std::byte> out(size[0]);
  if (!out.empty()) TRY(exchange(ranks, {}, {{rank, out}}));
  return out;
}

Status combine(Transport* ranks, MutableBytes mine, const std::function<void(Bytes theirs)>& add) {
  if (rank_count(ranks) == 1 || mine.empty()) return {};
  const Tree tree = tree_of(*ranks);
  std::vector<std::byte> theirs(mine.size());
  for (const int child : tree.children) {
    TRY(exchange(*ranks, {}, {{child, theirs}}));
    add(theirs);
  }
  if (tree.parent >= 0) TRY(exchange(*ranks, {{tree.parent, mine}}, {}));
  return spread(*ranks, mine);
}

Status maximum(Transport* ranks, std::span<Index> values) {
  return combine_values(ranks, values, [](Index& a, Index b) { a = std::max(a, b); });
}

Result<Index> minimum(Transport* ranks, Index value) {
  Index values[1] = {value};
  TRY(combine_values(ranks, std::span<Index>(values), [](Index& a, Index b) { a = std::min(a, b); }));
  return values[0];
}

Result<bool> all_equal(Transport* ranks, std::uint64_t value) {
  std::uint64_t ends[2] = {value, ~value};
  TRY(combine_values(ranks, std::span<std::uint64_t>(ends),
                     [](std::uint64_t& a, std::uint64_t b) { a = std::max(a, b); }));
  return ends[0] == ~ends[1];
}

}  // namespace reshard
