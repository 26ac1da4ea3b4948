// SPDX-License-Identifier: Apache-2.0
// The representation of a pickle's values in memory: 32-bit handles, and the cells of containers. The machine
// (pickle_machine.cc and its headers) fills a Tree, the accessors (pickle_value.cc) read it. Nothing else includes
// this.
//
//   handle   30 bits of payload, 2 bits of tag: a cell's index, a small integer, a position in the pickle, a constant
//   cells    (2, 3) as a tuple: header(kTuple, 2), small_int(2), small_int(3)
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "formats/encoding/pickle.h"
#include "formats/encoding/pickle_opcodes.h"
#include "formats/encoding/pickle_text.h"
#include "lib/base/checked.h"

namespace reshard::pickle::internal {

// A value in 32 bits. The low two bits are the tag.
using Handle = std::uint32_t;
enum Tag : std::uint32_t {
  kNode = 0,      // index of a cell: a container or an object
  kSmallInt = 1,  // the number, signed
  kLeaf = 2,      // position in the pickle of the opcode that pushed a string or a number
  kConstant = 3,  // one of the below, or a global
};
constexpr Handle handle(Tag tag, std::uint32_t payload) { return payload << 2 | tag; }
constexpr Tag tag_of(Handle h) { return static_cast<Tag>(h & 3); }
constexpr std::uint32_t payload_of(Handle h) { return h >> 2; }

constexpr Handle kNone = handle(kConstant, 0);
constexpr Handle kTrue = handle(kConstant, 1);
constexpr Handle kFalse = handle(kConstant, 2);
constexpr Handle kEmptyTuple = handle(kConstant, 3);
constexpr std::uint32_t kFirstGlobal = 4;  // payloads from here on are 4 + index of a global
constexpr Handle kUnset = 0;               // no value: cell 0 is never a node, and new memory is zero

constexpr Index kSmallIntEnd = Index{1} << 29;
constexpr bool is_small_int(Index v) { return v >= -kSmallIntEnd && v < kSmallIntEnd; }
constexpr Handle small_int(Index v) { return handle(kSmallInt, static_cast<std::uint32_t>(v)); }

// A node's first cell has the kind in its low four bits and a count in the others.
//   Tuple            count, elements...
//   List, Set, Dict  count, index of the cells with the elements (keys and values in turn)
//   Object           number of argument cells (0 or 1), callee, state, [args, unless they are ()]
//   PersistentId     0, id
constexpr std::uint32_t header(Kind kind, std::uint32_t count) { return count << 4 | static_cast<std::uint32_t>(kind); }
constexpr std::uint32_t kMaxCount = (1u << 28) - 1;
constexpr std::uint32_t kState = 2, kArgs = 3;  // cells of an Object

// Returns the capacity of a growing container with n cells. It depends only on n, so it is not stored.
constexpr std::uint32_t room(std::uint32_t n) { return n <= 8 ? n : std::bit_ceil(n); }

// An array of cells whose full capacity is reserved at the beginning: reading n bytes never needs more than a small
// multiple of n. Unused capacity takes addresses but no memory, and the array never moves.
class Cells {
 public:
  Cells() = default;
  Cells(const Cells&) = delete;
  Cells& operator=(const Cells&) = delete;
  ~Cells() {
    if (is_mapped_) {
      munmap(data_, bytes());
    } else {
      std::free(data_);
    }
  }

  // Reserves cells, which are zero. Returns false if that fails. Pass `is_dense` if nearly all of them will be used.
  bool reserve(Index capacity, bool is_dense) {
    capacity_ = static_cast<std::uint32_t>(capacity);
    if (bytes() < kMappedBytes) {
      data_ = static_cast<std::uint32_t*>(std::calloc(std::max<std::size_t>(bytes(), 1), 1));
      return data_ != nullptr;
    }
    void* p = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return false;
    if (is_dense) madvise(p, bytes(), MADV_HUGEPAGE);  // a page fault every 4 KiB would double the time
    data_ = static_cast<std::uint32_t*>(p);
    is_mapped_ = true;
    return true;
  }

  std::uint32_t size() const { return size_; }
  std::uint32_t capacity() const { return capacity_; }
  std::uint32_t* data() { return data_; }
  const std::uint32_t* data() const { return data_; }
  std::uint32_t& operator[](std::uint32_t i) { return data_[i]; }
  std::uint32_t operator[](std::uint32_t i) const { return data_[i]; }
  std::uint32_t back() const { return data_[size_ - 1]; }
  std::uint32_t& back() { return data_[size_ - 1]; }
  bool empty() const { return size_ == 0; }

  bool has_room(std::uint32_t n) const { return n <= capacity_ - size_; }
  // Sets the size, at most the capacity. Cells that were never used are zero.
  void resize(std::uint32_t n) { size_ = n; }
  // Appends a cell. Requires has_room(1).
  void push(std::uint32_t v) { data_[size_++] = v; }

 private:
  static constexpr std::size_t kMappedBytes = 1 << 20;
  std::size_t bytes() const { return std::size_t{capacity_} * sizeof(std::uint32_t); }

  std::uint32_t* data_ = nullptr;
  std::uint32_t size_ = 0;
  std::uint32_t capacity_ = 0;
  bool is_mapped_ = false;
};

// Returns the two's complement number in n little-endian bytes, or nothing if it does not fit.
inline std::optional<Index> decode_long(const unsigned char* p, std::size_t n) {
  if (n == 0) return 0;
  const unsigned char sign = p[n - 1] & 0x80 ? 0xff : 0;
  while (n > 8 && p[n - 1] == sign) --n;
  if (n > 8) return std::nullopt;
  std::uint64_t v = little_endian(p, n);
  if (n < 8 && sign != 0) v |= ~std::uint64_t{0} << (8 * n);
  const Index out = static_cast<Index>(v);
  // The bytes beyond the eighth were sign extension, so the sign of these eight must agree.
  if (n == 8 && (out < 0) != (sign != 0)) return std::nullopt;
  return out;
}

// Properties that few values have.
struct RareProperties {
  Handle items = kNone;
  Handle state = kNone;
  Handle keywords = kNone;
};

struct GlobalName {
  std::string module;
  std::string name;
};

struct Tree {
  Text text;
  std::string path;
  Cells cells;
  std::vector<GlobalName> globals;
  std::unordered_map<Handle, RareProperties> attached;
  Handle root = kNone;

  const unsigned char* raw() const { return text.data(); }
  std::uint32_t cell(std::uint32_t i) const { return cells[i]; }
  std::uint32_t head(Handle node) const { return cells[payload_of(node)]; }
  Kind node_kind(Handle node) const { return static_cast<Kind>(head(node) & 15); }
};

struct LeafBytes {
  Kind kind;
  const unsigned char* data;
  std::size_t size;
};

// Returns the payload of a leaf. Its bounds were checked when it was pushed.
inline LeafBytes leaf_bytes(const Tree& tree, Handle h) {
  const unsigned char* p = tree.raw() + payload_of(h);
  const Leaf leaf = leaf_of(*p++);
  if (leaf.length_width == 0) return {leaf.kind, p, leaf.fixed};
  return {leaf.kind, p + leaf.length_width, static_cast<std::size_t>(little_endian(p, leaf.length_width))};
}

inline std::string_view text_of(const LeafBytes& leaf) { return {reinterpret_cast<const char*>(leaf.data), leaf.size}; }

}  // namespace reshard::pickle::internal
