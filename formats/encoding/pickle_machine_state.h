// SPDX-License-Identifier: Apache-2.0
// The state of the pickle machine (pickle_machine.cc): its position in the bytes, the stack with its marks, the memo
// and the cells; and the steps that opcodes consist of. Only the machine and pickle_machine_records.h include this.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "formats/encoding/pickle.h"
#include "formats/encoding/pickle_tree.h"
#include "lib/base/result.h"
#include "lib/base/text.h"

namespace reshard::pickle::internal {
namespace {

// The state and its steps. A step that fails returns false and sets `problem_`.
class MachineState {
 public:
  MachineState(const MachineState&) = delete;
  MachineState& operator=(const MachineState&) = delete;

 protected:
  static constexpr std::size_t kAhead = 64 << 10;  // the most bytes that a step may read

  MachineState(Tree& tree, const Limits& limits)
      : tree_(tree), limits_(limits), raw_(tree.raw()), size_(tree.text.size()) {}
  ~MachineState() = default;

  [[gnu::cold, gnu::noinline]] bool fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }
  [[gnu::cold, gnu::noinline]] bool refuse(std::string problem) {
    unsupported_ = true;
    return fail(std::move(problem));
  }

  [[gnu::cold, gnu::noinline]] bool fail_short(std::uint64_t wanted) {
    return fail("expected " + bytes_of(wanted) + ", got " + std::to_string(size_ - pos_) + " before the end");
  }
  [[gnu::cold, gnu::noinline]] bool fail_depth(std::uint32_t n) {
    return fail("expected " + count_of(n, "value") + " on the stack, got " + std::to_string(stack_.size() - floor_));
  }
  [[gnu::cold, gnu::noinline]] bool fail_stack() {
    return fail("more than " + count_of(limits_.stack, "value") + " on the stack");
  }
  [[gnu::cold, gnu::noinline]] bool fail_cells() {
    lacks_cells_ = true;
    return fail("more than " + with_commas(tree_.cells.capacity() - 1) + " cells");
  }
  [[gnu::cold, gnu::noinline]] bool fail_memo(std::uint32_t i) {
    return fail("expected a memo index that was put, got " + std::to_string(i));
  }

  // Reserves stack, memo and cells for the whole pickle. An opcode pushes and memoizes at most one value, and takes at
  // most 3 cells for each of its bytes; the worst case is a list that grows element by element and just exceeded eight.
  // Pass `is_dense` if most opcodes need that much.
  bool reserve(bool is_dense) {
    const Index n = size_;
    if (!stack_.reserve(std::min(limits_.stack, n), is_dense) ||
        !marks_.reserve(std::min(limits_.stack, n), is_dense) || !memo_.reserve(std::min(limits_.memo, n), is_dense) ||
        !tree_.cells.reserve(1 + std::min(limits_.cells, 3 * n + 16), is_dense))
      return false;
    tree_.cells.push(0);  // kUnset is not a node
    return true;
  }

  // Makes sure that the bytes of the next step were read.
  [[gnu::always_inline]] bool ahead() {
    return pos_ + kAhead <= tree_.text.filled() || tree_.text.filled() == size_ || read_on(pos_ + kAhead);
  }
  [[gnu::cold, gnu::noinline]] bool read_on(std::size_t end) {
    if (file_) file_ = tree_.text.fill(end);
    return file_.has_value();
  }

  bool need(std::uint64_t n) { return n <= size_ - pos_ || fail_short(n); }
  std::uint64_t take(std::size_t n) {
    const std::uint64_t v = little_endian(raw_ + pos_, n);
    pos_ += n;
    return v;
  }

  // Skips a FRAME opcode. It is only a hint for reading ahead.
  bool frame() {
    if (!need(8)) return false;
    return need(take(8));
  }

  [[gnu::always_inline]] bool push(Handle h) {
    if (!stack_.has_room(1)) return fail_stack();
    stack_.push(h);
    return true;
  }
  // Values below the last mark belong to an unfinished container and cannot be popped.
  [[gnu::always_inline]] bool depth_needed(std::uint32_t n) { return stack_.size() - floor_ >= n || fail_depth(n); }
  Handle pop() {
    const Handle h = stack_.back();
    drop(1);
    return h;
  }
  void drop(std::uint32_t n) { stack_.resize(stack_.size() - n); }
  Handle* last(std::uint32_t n) { return stack_.data() + (stack_.size() - n); }

  bool mark_needed() { return !marks_.empty() || fail("expected a mark on the stack, got none"); }
  bool push_mark() {
    if (!marks_.has_room(1)) return fail("more than " + with_commas(limits_.stack) + " marks");
    floor_ = stack_.size();
    marks_.push(floor_);
    return true;
  }
  bool drop_mark() {
    marks_.resize(marks_.size() - 1);
    floor_ = marks_.empty() ? 0 : marks_.back();
    return true;
  }
  std::uint32_t above_mark() const { return stack_.size() - floor_; }

  // Allocates n cells at the end of the tree, at index node_.
  [[gnu::always_inline]] bool allocate(std::uint32_t n) {
    node_ = tree_.cells.size();
    if (!tree_.cells.has_room(n)) return fail_cells();
    tree_.cells.resize(node_ + n);
    return true;
  }
  bool tuple_of_last(std::uint32_t n) {
    if (!depth_needed(n)) return false;
    if (n == 0) return push(kEmptyTuple);
    if (!allocate(1 + n)) return false;
    std::uint32_t* cells = tree_.cells.data() + node_;
    cells[0] = header(Kind::kTuple, n);
    std::memcpy(cells + 1, last(n), n * sizeof(Handle));
    drop(n);
    return push(handle(kNode, node_));
  }

  bool is_node(Handle h, Kind kind) const { return tag_of(h) == kNode && tree_.node_kind(h) == kind; }

  Tree& tree_;
  const Limits& limits_;
  const unsigned char* raw_;
  std::size_t size_;
  std::size_t pos_ = 0;
  std::size_t op_at_ = 0;
  bool unsupported_ = false;
  bool lacks_cells_ = false;
  std::string problem_;
  Status file_;  // the result of reading on

  Cells stack_;
  Cells marks_;              // height of the stack at each mark
  std::uint32_t floor_ = 0;  // the last mark, or 0
  Cells memo_;
  std::uint32_t memo_used_ = 0;  // number of memo entries that are set
  Handle torch_size_ = kUnset;   // the global torch.Size, once it occurred
  std::uint32_t node_ = 0;       // the first cell that allocate() returned
};

}  // namespace
}  // namespace reshard::pickle::internal
