// SPDX-License-Identifier: Apache-2.0
// The accessors of Value and Document.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "formats/encoding/pickle.h"
#include "formats/encoding/pickle_tree.h"

namespace reshard::pickle {

using internal::decode_long;
using internal::kArgs;
using internal::kConstant;
using internal::kEmptyTuple;
using internal::kFalse;
using internal::kFirstGlobal;
using internal::kLeaf;
using internal::kNode;
using internal::kNone;
using internal::kSmallInt;
using internal::kState;
using internal::kTrue;
using internal::leaf_bytes;
using internal::LeafBytes;
using internal::payload_of;
using internal::tag_of;
using internal::text_of;
using internal::Tree;

std::string_view kind_name(Kind kind) {
  switch (kind) {
    case Kind::kNone:
      return "None";
    case Kind::kBool:
      return "a bool";
    case Kind::kInt:
      return "an int";
    case Kind::kBigInt:
      return "an int beyond 64 bits";
    case Kind::kFloat:
      return "a float";
    case Kind::kString:
      return "a string";
    case Kind::kBytes:
      return "bytes";
    case Kind::kTuple:
      return "a tuple";
    case Kind::kList:
      return "a list";
    case Kind::kDict:
      return "a dict";
    case Kind::kSet:
      return "a set";
    case Kind::kGlobal:
      return "a global";
    case Kind::kObject:
      return "an object";
    case Kind::kPersistentId:
      return "a persistent id";
  }
  return "";
}

Kind Value::kind() const {
  switch (tag_of(handle_)) {
    case kSmallInt:
      return Kind::kInt;
    case kNode:
      return tree_->node_kind(handle_);
    case kLeaf: {
      const LeafBytes leaf = leaf_bytes(*tree_, handle_);
      if (leaf.kind == Kind::kInt && !decode_long(leaf.data, leaf.size)) return Kind::kBigInt;
      return leaf.kind;
    }
    case kConstant:
      break;
  }
  if (handle_ == kNone) return Kind::kNone;
  if (handle_ == kTrue || handle_ == kFalse) return Kind::kBool;
  return handle_ == kEmptyTuple ? Kind::kTuple : Kind::kGlobal;
}

std::optional<bool> Value::as_bool() const {
  if (handle_ != kTrue && handle_ != kFalse) return std::nullopt;
  return handle_ == kTrue;
}

std::optional<Index> Value::as_int() const {
  if (tag_of(handle_) == kSmallInt) return static_cast<std::int32_t>(handle_) >> 2;
  if (tag_of(handle_) != kLeaf) return std::nullopt;
  const LeafBytes leaf = leaf_bytes(*tree_, handle_);
  if (leaf.kind != Kind::kInt) return std::nullopt;
  return decode_long(leaf.data, leaf.size);
}

std::optional<double> Value::as_float() const {
  if (kind() != Kind::kFloat) return std::nullopt;
  const unsigned char* p = leaf_bytes(*tree_, handle_).data;
  std::uint64_t bits = 0;
  for (int i = 0; i < 8; ++i) bits = bits << 8 | p[i];  // floats are the only big-endian numbers in a pickle
  return std::bit_cast<double>(bits);
}

std::optional<std::string_view> Value::as_string() const {
  if (tag_of(handle_) != kLeaf) return std::nullopt;
  const LeafBytes leaf = leaf_bytes(*tree_, handle_);
  if (leaf.kind != Kind::kString) return std::nullopt;
  return text_of(leaf);
}

std::optional<std::string_view> Value::as_bytes() const {
  if (tag_of(handle_) != kLeaf) return std::nullopt;
  const LeafBytes leaf = leaf_bytes(*tree_, handle_);
  if (leaf.kind != Kind::kBytes) return std::nullopt;
  return text_of(leaf);
}

std::optional<std::string_view> Value::as_big_int() const {
  if (kind() != Kind::kBigInt) return std::nullopt;
  return text_of(leaf_bytes(*tree_, handle_));
}

std::string Value::big_int_text() const {
  std::string digits;  // two's complement, most significant byte first
  bool negative = false;
  if (kind() == Kind::kBigInt) {
    const LeafBytes leaf = leaf_bytes(*tree_, handle_);
    negative = (leaf.data[leaf.size - 1] & 0x80) != 0;
    for (std::size_t i = leaf.size; i-- > 0;) digits += static_cast<char>(leaf.data[i]);
  } else if (const std::optional<Index> v = as_int()) {
    negative = *v < 0;
    for (int shift = 56; shift >= 0; shift -= 8) digits += static_cast<char>(static_cast<std::uint64_t>(*v) >> shift);
  } else {
    return "";
  }
  if (negative) {  // the magnitude: invert and add one
    bool carry = true;
    for (std::size_t i = digits.size(); i-- > 0;) {
      const unsigned v = (static_cast<unsigned char>(digits[i]) ^ 0xffu) + (carry ? 1u : 0u);
      digits[i] = static_cast<char>(v);
      carry = v > 0xff;
    }
  }
  std::string out;
  for (char c : digits)
    for (int shift : {4, 0}) out += "0123456789abcdef"[static_cast<unsigned char>(c) >> shift & 15];
  out.erase(0, std::min(out.find_first_not_of('0'), out.size() - 1));
  return (negative ? "-0x" : "0x") + out;
}

std::size_t Value::size() const {
  if (tag_of(handle_) != kNode) return 0;
  const Kind k = kind();
  if (k == Kind::kObject || k == Kind::kPersistentId) return 0;
  return tree_->head(handle_) >> 4;
}

Value Value::operator[](std::size_t i) const {
  const Kind k = kind();
  if (i >= size() || k == Kind::kDict) return at(kNone);
  const std::uint32_t node = payload_of(handle_);
  const std::uint32_t first = k == Kind::kTuple ? node + 1 : tree_->cell(node + 1);
  return at(tree_->cell(first + static_cast<std::uint32_t>(i)));
}

Value Value::key(std::size_t i) const {
  if (i >= size() || kind() != Kind::kDict) return at(kNone);
  return at(tree_->cell(tree_->cell(payload_of(handle_) + 1) + 2 * static_cast<std::uint32_t>(i)));
}

Value Value::value(std::size_t i) const {
  if (i >= size() || kind() != Kind::kDict) return at(kNone);
  return at(tree_->cell(tree_->cell(payload_of(handle_) + 1) + 2 * static_cast<std::uint32_t>(i) + 1));
}

std::optional<Value> Value::find(std::string_view wanted) const {
  if (kind() != Kind::kDict) return std::nullopt;
  for (std::size_t i = size(); i-- > 0;)
    if (key(i).as_string() == wanted) return value(i);
  return std::nullopt;
}

std::string_view Value::module() const {
  return kind() == Kind::kGlobal ? tree_->globals[payload_of(handle_) - kFirstGlobal].module : std::string_view();
}

std::string_view Value::name() const {
  return kind() == Kind::kGlobal ? tree_->globals[payload_of(handle_) - kFirstGlobal].name : std::string_view();
}

bool Value::is_global(std::string_view wanted_module, std::string_view wanted_name) const {
  return kind() == Kind::kGlobal && name() == wanted_name && module() == wanted_module;
}

Value Value::callee() const { return kind() == Kind::kObject ? at(tree_->cell(payload_of(handle_) + 1)) : at(kNone); }

Value Value::args() const {
  if (kind() != Kind::kObject) return at(kNone);
  return at(tree_->head(handle_) >> 4 == 0 ? kEmptyTuple : tree_->cell(payload_of(handle_) + kArgs));
}

Value Value::state() const {
  if (kind() == Kind::kObject) return at(tree_->cell(payload_of(handle_) + kState));
  const auto it = tree_->attached.find(handle_);
  return at(it == tree_->attached.end() ? kNone : it->second.state);
}

Value Value::keywords() const {
  const auto it = tree_->attached.find(handle_);
  return at(it == tree_->attached.end() ? kNone : it->second.keywords);
}

Value Value::items() const {
  const auto it = tree_->attached.find(handle_);
  return at(it == tree_->attached.end() ? kNone : it->second.items);
}

bool Value::is_object(std::string_view wanted_module, std::string_view wanted_name) const {
  return callee().is_global(wanted_module, wanted_name);
}

Value Value::persistent_id() const {
  return kind() == Kind::kPersistentId ? at(tree_->cell(payload_of(handle_) + 1)) : at(kNone);
}

Error Value::mismatch(std::string_view what, std::string_view expected) const {
  std::string got(kind_name(kind()));
  switch (kind()) {
    case Kind::kTuple:
    case Kind::kList:
    case Kind::kDict:
    case Kind::kSet:
      got += " of " + std::to_string(size());
      break;
    case Kind::kNone:
      break;
    default:
      got += " " + print(*this, 1, 4);
  }
  return corrupt(tree_->path + ": " + std::string(what) + ": expected " + std::string(expected) + ", got " + got);
}

Document::Document(std::unique_ptr<const Tree> tree) : tree_(std::move(tree)) {}
Document::Document(Document&&) noexcept = default;
Document& Document::operator=(Document&&) noexcept = default;
Document::~Document() = default;

Value Document::root() const { return {tree_.get(), tree_->root}; }

std::vector<std::string> Document::globals() const {
  std::vector<std::string> out;
  for (const internal::GlobalName& g : tree_->globals) out.push_back(g.module + "." + g.name);
  return out;
}

std::string_view Document::bytes() const { return {reinterpret_cast<const char*>(tree_->raw()), tree_->text.size()}; }
Index Document::cells() const { return Index{tree_->cells.size()} - 1; }  // the first cell is unused

}  // namespace reshard::pickle
