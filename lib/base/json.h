// JSON as checkpoints use it: safetensors headers, weight maps, config.json, and what this program prints for machines.
//
// Reading is strict, because the text comes from strangers: UTF-8, no duplicate keys, no depth beyond a limit, no
// trailing bytes, integers exactly as written or not at all. NaN, Infinity and -Infinity are numbers, as Python's json
// writes and reads them. An error names the path and the offset of the byte:
//   model.safetensors@0x1f: duplicate key 'dtype'
// Getters name the key and what stands there, and are meant to be prefixed with the path by `.context(path)`:
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
  bool is_integer() const;  // also one above INT64_MAX
  bool is_number() const { return is_integer() || std::holds_alternative<double>(value_); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_array() const { return std::holds_alternative<Items>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }
  std::string_view kind() const;  // "an integer", "a string", ..., for messages

  // The value as a type; the error says what is there instead. Views last as long as this value stays as it is.
  Result<bool> as_bool() const;
  Result<Index> as_index() const;           // refuses fractions and what does not fit
  Result<std::uint64_t> as_uint64() const;  // refuses negative numbers
  Result<double> as_double() const;         // any number
  Result<std::string_view> as_string() const;
  Result<std::span<const Json>> as_array() const;
  Result<std::span<const Member>> as_object() const;

  // A member; null where there is none, or where this is no object. Constant time.
  const Json* find(std::string_view key) const;
  bool contains(std::string_view key) const { return find(key) != nullptr; }

  // A member that has to be there, as a type. The error begins with the key.
  Result<bool> get_bool(std::string_view key) const;
  Result<Index> get_index(std::string_view key) const;
  Result<std::string_view> get_string(std::string_view key) const;
  Result<std::span<const Json>> get_array(std::string_view key) const;
  Result<std::span<const Member>> get_object(std::string_view key) const;

  // Adds a member to an object, or replaces its value. A null becomes an object first. Returns *this.
  Json& set(std::string_view key, Json value);
  // Adds a member and returns its value to be filled; null when the key is there already.
  Json* try_add(std::string key);
  // Appends to an array. A null becomes an array first. Returns *this, as set() does.
  Json& push_back(Json value);
  // Appends to an array and returns the new item, to be filled. A null becomes an array first.
  Json& add_item(Json value);

  std::size_t size() const;  // members or items; 0 for anything else

 private:
  using Items = std::vector<Json>;
  // Members in order, and for all but small objects a hash table of their positions.
  struct Object {
    Object();  // these five because Member is not complete here
    Object(const Object&);
    Object(Object&&) noexcept;
    Object& operator=(Object) noexcept;
    ~Object();

    std::vector<Member> members;
    std::vector<std::uint32_t> slots;  // position + 1, 0: free; open addressing, at most half full

    std::size_t slot_of(std::string_view key) const;
    const Member* find(std::string_view key) const;
    Json* add(std::string key);  // the caller has looked that it is not there
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
  int depth = 64;            // arrays and objects inside one another
  Index values = 4'000'000;  // held in memory at a time, keys of an object included
  std::string_view until;    // for parse_json_members(): the text ends before the member of this key; empty: at its end
};

// Reads a whole text. `path` and `base` (the offset of text[0] in that file) only serve the messages.
Result<Json> parse_json(std::string_view text, std::string_view path, const JsonLimits& limits = {}, Index base = 0);

// Reads a text that is one object and hands over its members one after the other, in the text's order, so that a large
// one is never in memory as a whole. An error of `member` ends the reading and is returned as it is.
using OnJsonMember = std::function<Status(const std::string& key, Json value)>;
Status parse_json_members(std::string_view text, std::string_view path, const OnJsonMember& member,
                          const JsonLimits& limits = {}, Index base = 0);

// The value as text: one line for `indent` 0, otherwise a member or item a line. The same value always gives the same
// text; numbers read back equal; a double that is not finite, for which JSON has no word, becomes null. Strings must be
// UTF-8 (is_utf8). `depth` is how many values it stands in, of a text that is put together of parts.
std::string to_text(const Json& value, int indent = 0, int depth = 0);
// The same for files that Python reads, such as a model's config.json: two spaces, a line's end behind it all, and
// Python's words for what is not finite.
std::string python_text(const Json& value);

// Appends `text` as a JSON string, quotes included.
void append_json_string(std::string& out, std::string_view text);

// Whether the bytes are well-formed UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
bool is_utf8(std::string_view text);
// JSON is UTF-8, and names from files need not be: the text itself where it is, otherwise with its bytes above 0x7f as
// \xNN.
std::string valid_utf8(std::string_view text);

}  // namespace reshard
