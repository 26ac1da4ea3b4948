// SPDX-License-Identifier: Apache-2.0
// JSON as checkpoints use it: safetensors headers, weight maps, config.json, and what this program prints for machines.
//
// Reading is strict, because the text is untrusted: it must be UTF-8, without duplicate keys, excessive nesting or
// trailing bytes, and an integer that does not fit is an error. NaN, Infinity and -Infinity are accepted, as Python's
// json writes them. An error names the path and the byte offset:
//   model.safetensors@0x1f: duplicate key 'dtype'
// Getters name the key and the type found; prefix the path with `.context(path)`:
//   config.json: num_attention_heads: expected an integer, got a string
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

// A JSON value. Objects keep the order in which their members were added.
class Json {
 public:
  struct Member;

  Json() = default;                                             // null
  Json(bool value) : value_(value) {}                           // NOLINT(google-explicit-constructor)
  Json(double value) : value_(value) {}                         // NOLINT(google-explicit-constructor)
  Json(std::string value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Json(std::string_view value) : value_(std::string(value)) {}  // NOLINT(google-explicit-constructor)
  Json(const char* value) : value_(std::string(value)) {}       // NOLINT(google-explicit-constructor)
  template <std::signed_integral T>
  Json(T value) : value_(static_cast<std::int64_t>(value)) {}  // NOLINT(google-explicit-constructor)
  template <std::unsigned_integral T>
  requires(!std::same_as<T, bool>) Json(T value) {  // NOLINT(google-explicit-constructor)
    if (value <= static_cast<std::uint64_t>(INT64_MAX))
      value_ = static_cast<std::int64_t>(value);
    else
      value_ = static_cast<std::uint64_t>(value);
  }

  static Json object();
  static Json array();

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_bool() const { return std::holds_alternative<bool>(value_); }
  bool is_integer() const;  // also above INT64_MAX
  bool is_number() const { return is_integer() || std::holds_alternative<double>(value_); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_array() const { return std::holds_alternative<Items>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }
  std::string_view kind() const;  // "an integer", "a string", ..., for messages

  // Return the value as the given type, or an error that says what type it has. Views are valid until this value
  // changes.
  Result<bool> as_bool() const;
  Result<Index> as_index() const;           // refuses fractions and values above INT64_MAX
  Result<std::uint64_t> as_uint64() const;  // refuses negative numbers
  Result<double> as_double() const;         // any number, rounded if it is an integer
  Result<std::string_view> as_string() const;
  Result<std::span<const Json>> as_array() const;
  Result<std::span<const Member>> as_object() const;

  // Returns a member, or null if there is none or this is not an object. Constant time.
  const Json* find(std::string_view key) const;
  bool contains(std::string_view key) const { return find(key) != nullptr; }

  // Return a required member as the given type. Errors begin with the key.
  Result<bool> get_bool(std::string_view key) const;
  Result<Index> get_index(std::string_view key) const;
  Result<std::string_view> get_string(std::string_view key) const;
  Result<std::span<const Json>> get_array(std::string_view key) const;
  Result<std::span<const Member>> get_object(std::string_view key) const;

  // Adds a member to an object or replaces its value. Null becomes an object first. Returns *this.
  Json& set(std::string_view key, Json value);
  // Adds a null member and returns its value for the caller to fill, or returns null if the key already exists.
  Json* try_add(std::string key);
  // Appends to an array. Null becomes an array first. Returns *this.
  Json& push_back(Json value);
  // Appends to an array and returns the new item. Null becomes an array first.
  Json& add_item(Json value);

  std::size_t size() const;  // members or items; 0 for anything else

 private:
  using Items = std::vector<Json>;
  // Members in insertion order. Objects beyond a few members also have a hash table of their positions.
  struct Object {
    Object();  // these five are out of line because Member is incomplete here
    Object(const Object&);
    Object(Object&&) noexcept;
    Object& operator=(Object) noexcept;
    ~Object();

    std::vector<Member> members;
    std::vector<std::uint32_t> slots;  // position + 1, or 0 if free; open addressing, at most half full

    std::size_t slot_of(std::string_view key) const;
    const Member* find(std::string_view key) const;
    Json* add(std::string key);  // the key must be new
  };

  template <class Get>
  auto get(std::string_view key, std::string_view wanted, Get as) const -> decltype(as(*this));

  std::variant<std::monostate, bool, std::int64_t, std::uint64_t, double, std::string, Items, Object> value_;
};

struct Json::Member {
  std::string key;
  Json value;
};

struct JsonLimits {
  int depth = 64;  // nesting of arrays and objects
  // Values in memory at one time; each key counts as one.
  Index values = 4'000'000;
  // For parse_json_members(): stop before the member with this key, where the text ends. Empty: read to the end.
  std::string_view until;
};

// Parses a complete text. `path` and `base` (the offset of text[0] in that file) are only used in messages.
Result<Json> parse_json(std::string_view text, std::string_view path, const JsonLimits& limits = {}, Index base = 0);

// Parses a text that is one object and passes its members to `member` in order, so that a large object is never in
// memory as a whole. An error from `member` stops the parse and is returned unchanged.
using OnJsonMember = std::function<Status(const std::string& key, Json value)>;
Status parse_json_members(std::string_view text, std::string_view path, const OnJsonMember& member,
                          const JsonLimits& limits = {}, Index base = 0);

// Serializes a value: on one line if `indent` is 0, otherwise one member or item a line. The output is deterministic,
// and numbers round-trip. A double that is not finite becomes null, and a string that is not UTF-8 what valid_utf8()
// returns. `depth` is the nesting level to indent from if the text becomes part of a larger one.
std::string to_text(const Json& value, int indent = 0, int depth = 0);
// Serializes for files that Python reads, such as config.json: two spaces of indentation, a final newline, and NaN and
// Infinity in Python's spelling.
std::string python_text(const Json& value);

// Appends valid_utf8(text) as a JSON string, quotes included.
void append_json_string(std::string& out, std::string_view text);

// Returns whether the bytes are well-formed UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
bool is_utf8(std::string_view text);
// Returns `text` if it is UTF-8, otherwise `text` with its bytes above 0x7f as \xNN. Names from files need not be
// UTF-8.
std::string valid_utf8(std::string_view text);

}  // namespace reshard
