// SPDX-License-Identifier: Apache-2.0
// Reads Python pickles without running them.
//
// A pickle is a program for a small stack machine. When Python runs it, it builds objects and may call any function
// that it names. This reader follows the same program, but records a call instead of making it, so the result is an
// inert tree. `.metadata` of torch.distributed.checkpoint and data.pkl of torch.save are pickles.
//
//   80 04                     protocol 4
//   8c 05 't' 'o' 'r' 'c' 'h' push a string     -> String
//   8c 04 'S' 'i' 'z' 'e'     push a string     -> String
//   93                        STACK_GLOBAL      -> Global torch.Size
//   4b 02 4b 03 86            (2, 3)            -> Tuple
//   85                        ((2, 3),)         -> Tuple
//   52                        REDUCE            -> would be an Object torch.Size((2, 3)); read as the Tuple (2, 3)
//   2e                        STOP
//
// Written by: Modules/_pickle.c of CPython; the opcodes are explained in Lib/pickletools.py.
//
// The metadata of a large run has tens of millions of values, so a value takes 32 bits: small integers and names of
// globals are stored in these bits, strings and other scalars are positions of their opcode in the pickle, and only
// containers take further memory. The tree's memory is proportional to the bytes read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard::pickle {

// The resources that a pickle may take before it is refused. Nesting is unlimited, as neither reading nor accessing
// values recurses.
struct Limits {
  Index bytes = (Index{1} << 30) - 1;  // of the pickle; a position takes 30 bits of a value
  Index stack = Index{1} << 20;        // values on the stack at once
  Index memo = Index{1} << 28;         // remembered values
  Index cells = Index{1} << 29;        // 4-byte cells of the tree
  Index globals = Index{1} << 16;      // distinct names
};

enum class Kind : std::uint8_t {
  kNone,
  kBool,
  kInt,     // fits an Index
  kBigInt,  // does not fit
  kFloat,
  kString,  // UTF-8 as stored, not validated
  kBytes,
  kTuple,  // also torch.Size
  kList,
  kDict,          // also collections.OrderedDict
  kSet,           // also frozenset
  kGlobal,        // module.name
  kObject,        // the result of a call, or an instance of a class
  kPersistentId,  // a reference outside the pickle; torch.save's storages
};
// Returns "a tuple", "an object", ...
std::string_view kind_name(Kind kind);

namespace internal {
struct Tree;
}

// A handle to a value of a Document, valid as long as the Document, which may be moved. Accessors for another kind of
// value return nothing, 0 or None. Indices must be below size().
class Value {
 public:
  Kind kind() const;
  bool is_none() const { return kind() == Kind::kNone; }
  bool is_sequence() const { return kind() == Kind::kTuple || kind() == Kind::kList; }
  // Returns a number that is equal for references to the same object of the pickle (and for equal small integers and
  // globals).
  std::uint32_t identity() const { return handle_; }

  std::optional<bool> as_bool() const;
  std::optional<Index> as_int() const;
  std::optional<double> as_float() const;              // floats only
  std::optional<std::string_view> as_string() const;   // a view into the document
  std::optional<std::string_view> as_bytes() const;    // a view into the document
  std::string big_int_text() const;                    // of a kInt or kBigInt, in hexadecimal: "0x1f…"
  std::optional<std::string_view> as_big_int() const;  // of a kBigInt: two's complement, least significant byte first

  // Returns the number of elements of a tuple, list or set, or of entries of a dict, which are in the order they were
  // set.
  std::size_t size() const;
  Value operator[](std::size_t i) const;  // element of a tuple, list or set
  Value key(std::size_t i) const;         // of a dict
  Value value(std::size_t i) const;       // of a dict
  // Returns the value of this key in a dict. If it was set twice the last one counts, as in Python. Linear in size().
  std::optional<Value> find(std::string_view wanted) const;

  std::string_view module() const;  // of a global; empty otherwise
  std::string_view name() const;    // of a global; empty otherwise
  bool is_global(std::string_view module, std::string_view name) const;

  // For an object: what was called (usually a global), its arguments, the state that BUILD set (None if there is none),
  // and the items appended to it (None, or a list or dict). Dicts, lists and sets may have a state as well.
  Value callee() const;
  Value args() const;      // a tuple
  Value keywords() const;  // None, or a dict
  Value state() const;
  Value items() const;
  // Returns whether this is an object made by calling exactly module.name.
  bool is_object(std::string_view module, std::string_view name) const;

  Value persistent_id() const;  // of a kPersistentId: usually a tuple

  // Returns a kCorrupt error "path: what: expected ..., got a tuple of 3".
  Error mismatch(std::string_view what, std::string_view expected) const;

 private:
  friend class Document;
  Value(const internal::Tree* tree, std::uint32_t handle) : tree_(tree), handle_(handle) {}
  Value at(std::uint32_t handle) const { return {tree_, handle}; }

  const internal::Tree* tree_;
  std::uint32_t handle_;
};

// A pickle that was read. Owns its bytes and the tree.
class Document {
 public:
  explicit Document(std::unique_ptr<const internal::Tree> tree);
  Document(Document&&) noexcept;
  Document& operator=(Document&&) noexcept;
  ~Document();

  Value root() const;
  // Returns "module.name" of every global in the pickle, used or not, in order of appearance.
  std::vector<std::string> globals() const;
  std::string_view bytes() const;
  Index cells() const;  // number of 4-byte cells in the tree

 private:
  std::unique_ptr<const internal::Tree> tree_;
};

// Reads one pickle that fills all of `bytes`. `path` is for error messages, which also give the offset and the opcode.
// Supports protocols 2 to 5 without the extension registry and out-of-band buffers, and GLOBAL, GET and PUT of the
// older protocols; fails with kUnsupported for other opcodes.
Result<Document> parse(std::string bytes, std::string_view path, const Limits& limits = {});

// Returns the length of the first pickle in `bytes`, found by stepping over its opcodes, or nothing if it has no STOP.
// An unknown opcode ends the pickle; parse() then fails with the name of the opcode.
std::optional<Index> length_of(std::string_view bytes);

// Returns a short text for people: "{'lr': 0.001, 'betas': (0.9, 0.95)}". Prints "..." below max_depth levels and after
// max_items elements of a container. Safe for cycles; control characters are escaped.
std::string print(Value value, int max_depth = 4, int max_items = 8);

}  // namespace reshard::pickle
