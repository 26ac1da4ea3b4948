// SPDX-License-Identifier: Apache-2.0
// Writes pickles of protocol 2, using only opcodes that torch.load(weights_only=True) accepts
// (torch/_weights_only_unpickler.py).
//
// Each call writes one opcode of a stack machine: values are pushed, containers take what was pushed.
//
//   PickleWriter w;                     // {"lr": 0.5}
//   w.empty_dict();
//   w.mark(); w.text("lr"); w.number(0.5); w.set_items();
//   std::string bytes = std::move(w).finish();
//
// Dict and List open a container that ends with their scope: Dict(w).number("lr", 0.5).
#pragma once

#include <cstdint>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "formats/encoding/pickle.h"
#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard::pickle {

// A pickle while it is written.
class PickleWriter {
 public:
  PickleWriter();

  void none() { op('N'); }
  void boolean(bool v) { op(v ? '\x88' : '\x89'); }
  void integer(Index v);
  // Writes any integer, given as two's complement of at most 255 bytes, least significant byte first.
  void big_integer(std::string_view bytes);
  void number(double v);
  void text(std::string_view s);  // shorter than 4 GiB
  void global(std::string_view module, std::string_view name);

  // Write a text or global; from the second time on, a reference to the first. Return the argument for get().
  std::uint32_t shared_text(std::string_view s);
  std::uint32_t shared_global(std::string_view module, std::string_view name);

  void mark() { op('('); }                  // begins the elements of a container
  void empty_list() { op(']'); }            // -> list
  void append_items() { op('e'); }          // list mark value... -> list
  void empty_dict() { op('}'); }            // -> dict
  void set_items() { op('u'); }             // dict mark (key value)... -> dict
  void empty_ordered_dict();                // -> collections.OrderedDict, to which set_items() applies too
  void empty_tuple() { op(')'); }           // -> tuple
  void tuple_of_last(int n);                // n values, 1 to 3 -> tuple
  void tuple_from_mark() { op('t'); }       // mark value... -> tuple
  void integers(std::span<const Index> v);  // -> tuple of ints, of any length

  void reduce() { op('R'); }         // callable args-tuple -> its result
  void new_object() { op('\x81'); }  // class args-tuple -> object
  void build() { op('b'); }          // object state -> object
  void persistent_id() { op('Q'); }  // id -> the object that it refers to

  // Memoizes the top of the stack without popping it, and returns the argument for get(), which pushes it again.
  std::uint32_t put();
  void get(std::uint32_t memo);

  Index size() const { return taken_ + held(); }  // bytes written so far
  Index held() const {                            // bytes that take() would return
    check_whole();
    return static_cast<Index>(out_.size());
  }
  // Returns the bytes written since the last call, so that a large pickle need not be in memory at once.
  std::string take();
  // Ends the pickle, whose value is the top of the stack, and returns the bytes that were not taken.
  std::string finish() &&;

 private:
  friend class Dict;
  friend class List;
  void op(char code) { out_ += code; }
  // Does op() at the end of a scope, where nothing may throw. If memory runs out, the next call that returns bytes
  // throws.
  void end(char code) noexcept;
  void check_whole() const {
    if (lacks_memory_) throw std::bad_alloc();
  }
  // Writes a reference to the value that key_ names and returns {memo, true} if it was written before. Otherwise
  // returns the memo that the next put() will give it, and false.
  std::pair<std::uint32_t, bool> get_shared();

  std::string out_;
  Index taken_ = 0;
  std::string key_;  // of shared_
  std::uint32_t next_memo_ = 0;
  bool lacks_memory_ = false;  // set by end()
  std::unordered_map<std::string, std::uint32_t> shared_;
};

// Writes a value that was read from a pickle: None, bool, int, float, str, bytes, tuple, list, dict and set, nested up
// to 64 levels. A value that two containers share is written twice. A torch.Size becomes a tuple, an OrderedDict a
// dict; torch's dtypes and devices, numpy arrays, complex and bytearray are kept. Fails with kUnsupported for anything
// else, so that outputs contain only data, and if the pickle exceeds `max_bytes`.
Status write_value(PickleWriter& w, Value value, Index max_bytes = Index{256} << 20);

// A dict with a few items, open until the end of the scope. Everything written meanwhile becomes its keys and values.
class Dict {
 public:
  explicit Dict(PickleWriter& w) : w_(w) {
    w.empty_dict();
    w.mark();
  }
  // Opens an OrderedDict.
  static Dict ordered(PickleWriter& w) { return Dict(w, true); }
  ~Dict() { w_.end('u'); }
  Dict(const Dict&) = delete;
  Dict& operator=(const Dict&) = delete;

  // Writes a key; the caller must write its value next.
  PickleWriter& key(std::string_view k) {
    w_.text(k);
    return w_;
  }
  PickleWriter& key(Index k) {
    w_.integer(k);
    return w_;
  }
  void none(std::string_view k) { key(k).none(); }
  void flag(std::string_view k, bool v) { key(k).boolean(v); }
  void integer(std::string_view k, Index v) { key(k).integer(v); }
  void number(std::string_view k, double v) { key(k).number(v); }
  void text(std::string_view k, std::string_view v) { key(k).text(v); }
  Status value(std::string_view k, Value v) { return write_value(key(k), v); }

 private:
  Dict(PickleWriter& w, bool /*ordered*/) : w_(w) {
    w.empty_ordered_dict();
    w.mark();
  }
  PickleWriter& w_;
};

// A list with a few elements, open until the end of the scope.
class List {
 public:
  explicit List(PickleWriter& w) : w_(w) {
    w.empty_list();
    w.mark();
  }
  ~List() { w_.end('e'); }
  List(const List&) = delete;
  List& operator=(const List&) = delete;

 private:
  PickleWriter& w_;
};

// The elements of a large list or dict, appended in runs of a thousand as Python's pickler does (Lib/pickle.py,
// _BATCHSIZE), so that a reader's stack stays small. Call next() before each element and end() after the last.
class ElementRuns {
 public:
  // `close` is &PickleWriter::append_items or &PickleWriter::set_items. The empty container must be on the stack.
  ElementRuns(PickleWriter& w, void (PickleWriter::*close)()) : w_(w), close_(close) {}
  void next() {
    if (in_run_ == kRun) end();
    if (in_run_++ == 0) w_.mark();
  }
  void end() {
    if (in_run_ > 0) (w_.*close_)();
    in_run_ = 0;
  }

 private:
  static constexpr int kRun = 1000;
  PickleWriter& w_;
  void (PickleWriter::*close_)();
  int in_run_ = 0;
};

}  // namespace reshard::pickle
