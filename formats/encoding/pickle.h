// Reads Python pickles without running them.
//
// A pickle is a program for a small stack machine that, when Python runs it, builds objects and may call any function
// it names. Here the same program is followed, but calling a function means remembering that it would have been called:
// the outcome is an inert tree. `.metadata` of torch.distributed.checkpoint and data.pkl of torch.save are pickles.
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
// The metadata of a large run has tens of millions of values, so a value is 32 bits: small integers and names of
// globals are in those bits, strings and other scalars point at their opcode in the pickle's own bytes, and only
// containers take room of their own. Memory for the tree is proportional to the bytes read.
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

// What a pickle may ask for before it is refused. Nesting has no limit: neither reading nor accessing values recurses.
struct Limits {
  Index bytes = (Index{1} << 30) - 1;  // of the pickle; values have 30 bits for a position
  Index stack = Index{1} << 20;        // values on the stack at once
  Index memo = Index{1} << 28;         // remembered values
  Index cells = Index{1} << 29;        // 4-byte cells of the tree
  Index globals = Index{1} << 16;      // distinct names
};

enum class Kind : std::uint8_t {
  kNone,
  kBool,
  kInt,     // fits an Index
  kBigInt,  // does not
  kFloat,
  kString,  // UTF-8 as stored, not validated
  kBytes,
  kTuple,  // also torch.Size
  kList,
  kDict,          // also collections.OrderedDict
  kSet,           // also frozenset
  kGlobal,        // module.name
  kObject,        // what a call or a class with a state would have made
  kPersistentId,  // a reference outside the pickle; torch.save's storages
};
std::string_view kind_name(Kind kind);  // "a tuple", "an object"

namespace internal {
struct Tree;
}

// A handle to a value of a Document; valid as long as the Document (which may be moved) lives. Accessors that do not
// fit the kind return nothing, 0 or None; indices must be below size().
class Value {
 public:
  Kind kind() const;
  bool is_none() const { return kind() == Kind::kNone; }
  bool is_sequence() const { return kind() == Kind::kTuple || kind() == Kind::kList; }
  // Equal for references to one object of the pickle (and for equal small integers and globals).
  std::uint32_t identity() const { return handle_; }

  std::optional<bool> as_bool() const;
  std::optional<Index> as_int() const;
  std::optional<double> as_float() const;             // floats only
  std::optional<std::string_view> as_string() const;  // into the document
  std::optional<std::string_view> as_bytes() const;   // into the document
  std::string big_int_text() const;                   // of a kInt or kBigInt: "0x1f…", hexadecimal
  std::optional<std::string_view> as_big_int()
      const;  // of a kBigInt: two's complement, the least significant byte first

  // Tuple, list, set: their elements. Dict: its entries, in the order they were set.
  std::size_t size() const;
  Value operator[](std::size_t i) const;  // element of a tuple, list or set
  Value key(std::size_t i) const;         // of a dict
  Value value(std::size_t i) const;       // of a dict
  // The dict entry with this string as key, the last one if it was set twice, as in Python. Takes time in size().
  std::optional<Value> find(std::string_view wanted) const;

  std::string_view module() const;  // of a global; empty otherwise
  std::string_view name() const;    // of a global; empty otherwise
  bool is_global(std::string_view module, std::string_view name) const;

  // Of an object: what was called (usually a global), with which arguments, the state it was given after (None if
  // none), and what was appended to it (None, or a list or dict). Dicts, lists and sets may have a state as well.
  Value callee() const;
  Value args() const;      // a tuple
  Value keywords() const;  // None, or a dict
  Value state() const;
  Value items() const;
  // Whether it is an object made by calling module.name, exactly.
  bool is_object(std::string_view module, std::string_view name) const;

  Value persistent_id() const;  // of a kPersistentId: usually a tuple

  // A corrupt error "path: what: expected ..., got a tuple of 3".
  Error mismatch(std::string_view what, std::string_view expected) const;

 private:
  friend class Document;
  Value(const internal::Tree* tree, std::uint32_t handle) : tree_(tree), handle_(handle) {}
  Value at(std::uint32_t handle) const { return {tree_, handle}; }

  const internal::Tree* tree_;
  std::uint32_t handle_;
};

// A pickle that was read: owns its bytes and the tree.
class Document {
 public:
  explicit Document(std::unique_ptr<const internal::Tree> tree);
  Document(Document&&) noexcept;
  Document& operator=(Document&&) noexcept;
  ~Document();

  Value root() const;
  // "module.name" of every global the pickle mentions, in order of appearance, whether used or not.
  std::vector<std::string> globals() const;
  std::string_view bytes() const;
  Index cells() const;  // 4-byte cells the tree takes

 private:
  std::unique_ptr<const internal::Tree> tree_;
};

// Reads one pickle that fills all of `bytes`. `path` serves error messages, which give the offset in `bytes` and the
// opcode. Opcodes are those of protocols 2 to 5 without the extension registry and out-of-band buffers, and GLOBAL, GET
// and PUT of the older ones; others are an unsupported error.
Result<Document> parse(std::string bytes, std::string_view path, const Limits& limits = {});

// How many of these bytes their first pickle takes up, found by stepping over its opcodes; nothing when its STOP is not
// among them. An opcode that is not known ends it: parse() will refuse those bytes and say which it is.
std::optional<Index> length_of(std::string_view bytes);

// A short text for people: "{'lr': 0.001, 'betas': (0.9, 0.95)}". Deeper than max_depth and beyond max_items elements
// of a container it says "...". Safe for cycles, and for terminals.
std::string print(Value value, int max_depth = 4, int max_items = 8);

}  // namespace reshard::pickle
