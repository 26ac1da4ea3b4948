// Writes pickles of protocol 2, with no opcodes but those that torch.load(weights_only=True) accepts
// (torch/_weights_only_unpickler.py).
//
// Each call writes one opcode of a stack machine: values are pushed, containers take what was pushed.
//
//   PickleWriter w;                     // {"lr": 0.5}
//   w.empty_dict();
//   w.mark(); w.text("lr"); w.number(0.5); w.set_items();
//   std::string bytes = std::move(w).finish();
//
// Dict and List write what is in nested ones in their scope: Dict(w).number("lr", 0.5).
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

class PickleWriter {
 public:
  PickleWriter();

  void none() { op('N'); }
  void boolean(bool v) { op(v ? '\x88' : '\x89'); }
  void integer(Index v);
  // Any integer, as two's complement of at most 255 bytes, the least significant first.
  void big_integer(std::string_view bytes);
  void number(double v);
  void text(std::string_view s);  // shorter than 4 GiB
  void global(std::string_view module, std::string_view name);

  // As text() and global(), but from the second time on a reference to the first. What get() takes for further ones.
  std::uint32_t shared_text(std::string_view s);
  std::uint32_t shared_global(std::string_view module, std::string_view name);

  void mark() { op('('); }                  // where the elements of the container to come begin
  void empty_list() { op(']'); }            // -> list
  void append_items() { op('e'); }          // list mark value... -> list
  void empty_dict() { op('}'); }            // -> dict
  void set_items() { op('u'); }             // dict mark (key value)... -> dict
  void empty_ordered_dict();                // -> collections.OrderedDict, a dict to set_items()
  void empty_tuple() { op(')'); }           // -> tuple
  void tuple_of_last(int n);                // n values, 1 to 3 -> tuple
  void tuple_from_mark() { op('t'); }       // mark value... -> tuple
  void integers(std::span<const Index> v);  // -> tuple of ints, of any length

  void reduce() { op('R'); }         // callable args-tuple -> its result
  void new_object() { op('\x81'); }  // class args-tuple -> object
  void build() { op('b'); }          // object state -> object
  void persistent_id() { op('Q'); }  // id -> what it stands for

  // Remembers the top of the stack, which stays; get() pushes it again.
  std::uint32_t put();
  void get(std::uint32_t memo);

  Index size() const { return taken_ + held(); }  // bytes so far
  Index held() const {                            // of them, those that take() would give
    check_whole();
    return static_cast<Index>(out_.size());
  }
  // Gives what was written since it was last called, for a pickle that is not to be in memory at once.
  std::string take();
  std::string finish() &&;  // the top of the stack is the pickle's value; what is left to take

 private:
  friend class Dict;
  friend class List;
  void op(char code) { out_ += code; }
  // op() at the end of a scope, where nothing may be thrown; who next asks for what was written hears of it.
  void end(char code) noexcept;
  void check_whole() const {
    if (lacks_memory_) throw std::bad_alloc();
  }
  // What key_ names, where it was written before; else what put() is about to give it.
  std::pair<std::uint32_t, bool> get_shared();

  std::string out_;
  Index taken_ = 0;
  std::string key_;  // of shared_
  std::uint32_t next_memo_ = 0;
  bool lacks_memory_ = false;  // for the end of a scope
  std::unordered_map<std::string, std::uint32_t> shared_;
};

// Pushes a value that was read from a pickle: None, bool, int, float, str, bytes, tuple, list, dict and set, inside one
// another up to 64 levels; what two containers share is written twice. A torch.Size becomes a tuple, an OrderedDict a
// dict; torch's dtypes and devices, arrays of numpy, complex and bytearray are kept. Anything else, and a pickle of
// more than `max_bytes`, is an unsupported error that names it: nothing but data leaves this program.
Status write_value(PickleWriter& w, Value value, Index max_bytes = Index{256} << 20);

// A dict of a few items, from here to the end of the scope. What is written meanwhile are its keys and values.
class Dict {
 public:
  explicit Dict(PickleWriter& w) : w_(w) {
    w.empty_dict();
    w.mark();
  }
  // An OrderedDict.
  static Dict ordered(PickleWriter& w) { return Dict(w, true); }
  ~Dict() { w_.end('u'); }
  Dict(const Dict&) = delete;
  Dict& operator=(const Dict&) = delete;

  // Its value is to be written next.
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

// Likewise a list of a few elements.
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

// The elements of a large list or dict, put in by runs of a thousand as Python's own pickler does (Lib/pickle.py,
// _BATCHSIZE), so that a reader's stack stays small. next() comes before each element, end() after the last.
class ElementRuns {
 public:
  // `close` is &PickleWriter::append_items or &PickleWriter::set_items; the empty container is on the stack.
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
