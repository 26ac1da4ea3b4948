// SPDX-License-Identifier: Apache-2.0
#include "lib/base/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>

#include "lib/base/cursor.h"
#include "lib/base/json_list.h"
#include "lib/base/json_parts.h"
#include "lib/base/number_table.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

// Below this many members a linear search is as fast as a table.
constexpr std::size_t kSmallObject = 8;

std::string name_of(std::string_view key) {
  constexpr std::size_t kLongest = 200;
  if (key.size() <= kLongest) return printable(key);
  return printable(key.substr(0, kLongest)) + "...";
}

}  // namespace

// ---- Json

Json Json::object() {
  Json json;
  json.value_ = Object{};
  return json;
}

Json Json::array() {
  Json json;
  json.value_ = Items{};
  return json;
}

bool Json::is_integer() const {
  return std::holds_alternative<std::int64_t>(value_) || std::holds_alternative<std::uint64_t>(value_);
}

std::string_view Json::kind() const {
  if (is_null()) return "null";
  if (is_bool()) return "a boolean";
  if (is_integer()) return "an integer";
  if (is_number()) return "a fraction";
  if (is_string()) return "a string";
  return is_array() ? "an array" : "an object";
}

namespace {
Error expected(std::string_view wanted, std::string_view got) {
  return corrupt("expected " + std::string(wanted) + ", got " + std::string(got));
}
}  // namespace

Result<bool> Json::as_bool() const {
  if (const bool* v = std::get_if<bool>(&value_)) return *v;
  return expected("a boolean", kind());
}

Result<Index> Json::as_index() const {
  if (const auto* v = std::get_if<std::int64_t>(&value_)) return *v;
  if (const auto* v = std::get_if<std::uint64_t>(&value_)) return expected("an integer below 2^63", std::to_string(*v));
  return expected("an integer", kind());
}

Result<std::uint64_t> Json::as_uint64() const {
  if (const auto* v = std::get_if<std::uint64_t>(&value_)) return *v;
  const auto* v = std::get_if<std::int64_t>(&value_);
  if (v == nullptr) return expected("an integer", kind());
  if (*v < 0) return expected("an integer of at least 0", std::to_string(*v));
  return *v;
}

Result<double> Json::as_double() const {
  if (const auto* v = std::get_if<double>(&value_)) return *v;
  if (const auto* v = std::get_if<std::int64_t>(&value_)) return static_cast<double>(*v);
  if (const auto* v = std::get_if<std::uint64_t>(&value_)) return static_cast<double>(*v);
  return expected("a number", kind());
}

Result<std::string_view> Json::as_string() const {
  if (const auto* v = std::get_if<std::string>(&value_)) return std::string_view(*v);
  return expected("a string", kind());
}

Result<std::span<const Json>> Json::as_array() const {
  if (const auto* v = std::get_if<Items>(&value_)) return std::span<const Json>(*v);
  return expected("an array", kind());
}

Result<std::span<const Json::Member>> Json::as_object() const {
  if (const auto* v = std::get_if<Object>(&value_)) return std::span<const Member>(v->members);
  return expected("an object", kind());
}

const Json* Json::find(std::string_view key) const {
  const auto* object = std::get_if<Object>(&value_);
  const Member* member = object ? object->find(key) : nullptr;
  return member ? &member->value : nullptr;
}

template <class Get>
auto Json::get(std::string_view key, std::string_view wanted, Get as) const -> decltype(as(*this)) {
  if (const Json* value = find(key)) {
    auto result = as(*value);
    return result.has_value() ? std::move(result)
                              : std::move(result).context(name_of(key));  // builds the message only on an error
  }
  const std::string_view got = is_object() ? "nothing" : "a value that is not an object";
  return expected(wanted, got).context(name_of(key));
}

Result<bool> Json::get_bool(std::string_view key) const {
  return get(key, "a boolean", [](const Json& v) { return v.as_bool(); });
}
Result<Index> Json::get_index(std::string_view key) const {
  return get(key, "an integer", [](const Json& v) { return v.as_index(); });
}
Result<std::string_view> Json::get_string(std::string_view key) const {
  return get(key, "a string", [](const Json& v) { return v.as_string(); });
}
Result<std::span<const Json>> Json::get_array(std::string_view key) const {
  return get(key, "an array", [](const Json& v) { return v.as_array(); });
}
Result<std::span<const Json::Member>> Json::get_object(std::string_view key) const {
  return get(key, "an object", [](const Json& v) { return v.as_object(); });
}

Json& Json::set(std::string_view key, Json value) {
  if (!is_object()) value_ = Object{};
  auto& object = std::get<Object>(value_);
  if (const Member* there = object.find(key)) {
    object.members[there - object.members.data()].value = std::move(value);
  } else {
    *object.add(std::string(key)) = std::move(value);
  }
  return *this;
}

Json* Json::try_add(std::string key) {
  if (!is_object()) value_ = Object{};
  auto& object = std::get<Object>(value_);
  return object.find(key) ? nullptr : object.add(std::move(key));
}

Json& Json::push_back(Json value) {
  add_item(std::move(value));
  return *this;
}

Json& Json::add_item(Json value) {
  if (!is_array()) value_ = Items{};
  auto& items = std::get<Items>(value_);
  if (items.empty()) items.reserve(4);  // most arrays are shapes
  return items.emplace_back(std::move(value));
}

std::size_t Json::size() const {
  if (const auto* object = std::get_if<Object>(&value_)) return object->members.size();
  const auto* items = std::get_if<Items>(&value_);
  return items ? items->size() : 0;
}

// ---- Json::Object

Json::Object::Object() = default;
Json::Object::Object(const Object&) = default;
Json::Object::Object(Object&&) noexcept = default;
Json::Object::~Object() = default;

Json::Object& Json::Object::operator=(Object other) noexcept {
  members.swap(other.members);
  slots.swap(other.slots);
  return *this;
}

// Returns the slot of `key`, or the free slot for it.
std::size_t Json::Object::slot_of(std::string_view key) const {
  const std::size_t mask = slots.size() - 1;
  std::size_t slot = std::hash<std::string_view>()(key) & mask;
  while (slots[slot] != 0 && members[slots[slot] - 1].key != key) slot = (slot + 1) & mask;
  return slot;
}

const Json::Member* Json::Object::find(std::string_view key) const {
  if (slots.empty()) {
    for (const Member& member : members)
      if (member.key == key) return &member;
    return nullptr;
  }
  const std::uint32_t position = slots[slot_of(key)];
  return position == 0 ? nullptr : &members[position - 1];
}

Json* Json::Object::add(std::string key) {
  if (members.empty()) members.reserve(4);  // a tensor's header entry has three
  members.push_back({std::move(key), Json()});
  if (members.size() > kSmallObject && 2 * members.size() > slots.size()) {
    slots.assign(std::max<std::size_t>(4 * kSmallObject, 2 * slots.size()), 0);
    for (std::size_t i = 0; i < members.size(); ++i) slots[slot_of(members[i].key)] = static_cast<std::uint32_t>(i + 1);
  } else if (!slots.empty()) {
    slots[slot_of(members.back().key)] = static_cast<std::uint32_t>(members.size());
  }
  return &members.back().value;
}

// ---- Reading

namespace {

// Iterates over the text for nlohmann's lexer and records its position, because SAX events carry none.
class TextIterator {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  TextIterator(const char* at, const char** reached) : at_(at), reached_(reached) {}
  reference operator*() const { return *at_; }
  TextIterator& operator++() {
    *reached_ = ++at_;
    return *this;
  }
  TextIterator operator++(int) {
    TextIterator before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const TextIterator& a, const TextIterator& b) { return a.at_ == b.at_; }

 private:
  const char* at_;
  const char** reached_;
};

// Python's number words that JSON lacks. They are replaced by strings of the same length before nlohmann parses the
// text, and told from real strings by their end offsets.
struct PythonNumber {
  std::string_view word;
  double value;
};
constexpr PythonNumber kPythonNumbers[] = {{"NaN", std::numeric_limits<double>::quiet_NaN()},
                                           {"Infinity", std::numeric_limits<double>::infinity()},
                                           {"-Infinity", -std::numeric_limits<double>::infinity()}};

struct WithPythonNumbers {
  explicit WithPythonNumbers(std::string_view from) : text(from) {
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '"') {  // skip to the end of the string
        for (++i; i < text.size() && text[i] != '"'; ++i) i += text[i] == '\\';
        continue;
      }
      for (const PythonNumber& number : kPythonNumbers) {
        if (!from.substr(i).starts_with(number.word)) continue;
        text[i] = '"';
        i += number.word.size() - 1;
        text[i] = '"';
        ends.emplace(static_cast<Index>(i) + 1, number.value);
        break;
      }
    }
  }

  std::string text;
  std::unordered_map<Index, double> ends;
};

// Returns nlohmann's message without its preamble (id, line, column: we print the offset) and without the "last read"
// text, which may be as long as the file.
std::string shortened(std::string_view what) {
  if (what.starts_with("[json.exception.")) what.remove_prefix(std::min(what.size(), what.find("] ") + 2));
  if (what.starts_with("parse error")) what.remove_prefix(std::min(what.size(), what.find(": ") + 2));
  const std::size_t last_read = what.find("; last read: ");
  std::string out = name_of(what.substr(0, last_read));
  const std::size_t wanted = what.rfind("; expected ");
  if (last_read != std::string_view::npos && wanted != std::string_view::npos && wanted > last_read)
    out += name_of(what.substr(wanted));
  return out;
}

// A set of keys, stored one after another in one string: a large header has millions.
class KeySet {
 public:
  // Returns false, without adding it, if the key is already there.
  bool add(std::string_view key) {
    if (places_.find(hash_of(key), [&](std::size_t i) { return get(i) == key; })) return false;
    text_ += key;
    ends_.push_back(text_.size());
    places_.add([this](std::size_t i) { return hash_of(get(i)); });
    return true;
  }
  Index size() const { return std::ssize(ends_); }

 private:
  static std::uint64_t hash_of(std::string_view key) { return std::hash<std::string_view>()(key); }
  std::string_view get(std::size_t i) const {
    const std::size_t begin = i == 0 ? 0 : ends_[i - 1];
    return std::string_view(text_).substr(begin, ends_[i] - begin);
  }

  std::string text_;
  std::vector<std::size_t> ends_;
  NumberTable places_;
};

// Builds a Json from nlohmann's SAX events. Each event returns false to stop parsing, with the reason in error_.
class Builder {
 public:
  Builder(std::string_view text, std::string_view path, Index base, const JsonLimits& limits,
          const OnJsonMember* member, const JsonParts* parts = nullptr)
      : text_(text), path_(path), base_(base), limits_(limits), member_(member), parts_(parts) {
    const auto has = [&](const PythonNumber& number) { return text.find(number.word) != std::string_view::npos; };
    if (std::any_of(std::begin(kPythonNumbers), std::end(kPythonNumbers), has)) text_ = python_.emplace(text).text;
    reached_ = text_.data();
  }

  Result<Json> run() {
    // nlohmann would take a NUL for the end of the text and skip a byte order mark.
    if (const std::size_t nul = text_.find('\0'); nul != std::string_view::npos)
      return refuse(nul, "expected JSON, got a zero byte").error();
    if (text_.starts_with("\xef\xbb\xbf")) return refuse(0, "expected JSON, got a byte order mark").error();
    const char* end = text_.data() + text_.size();
    const bool done = nlohmann::json::sax_parse(TextIterator(text_.data(), &reached_), TextIterator(end, &reached_),
                                                this, nlohmann::json::input_format_t::json, true, false);
    if (error_) return *std::move(error_);
    if (is_at_end_) return Json();
    if (!done) return internal_error(std::string(path_) + ": the JSON parser stopped without an error");
    return std::move(root_);
  }

  // The events, with nlohmann's names.
  bool null() { return add(Json()); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(std::int64_t value) { return add(value); }
  bool number_unsigned(std::uint64_t value) { return add(value); }
  bool number_float(double value, const std::string& digits) {
    if (digits.find_first_not_of("-0123456789") != std::string::npos) return add(value);
    // The lexer has consumed one byte beyond a number unless the text ends there.
    const Index end = reached() - (digits.back() == text_[static_cast<std::size_t>(reached()) - 1] ? 0 : 1);
    return fail(end - std::ssize(digits), "expected an integer of at most 64 bits, got " + name_of(digits));
  }
  bool string(std::string& value) {
    const double* number = python_number();
    return number ? add(*number) : add(std::move(value));
  }
  bool binary(nlohmann::json::binary_t&) { return fail(reached(), "expected JSON, got a binary value"); }
  bool start_object(std::size_t) { return open(Json::object()); }
  bool start_array(std::size_t) { return open(Json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool key(std::string& key) {
    if (python_number()) return fail(reached() - 1, "expected a string for a key, got a number");
    if (member_ && open_.size() == 1) {
      is_at_end_ = !limits_.until.empty() && key == limits_.until;
      if (is_at_end_) return false;
      value_ = keys_.add(key) ? &value_of_root_ : nullptr;
      last_key_ = key;
    } else if (is_in_parts()) {
      value_ = part_keys_.add(key) ? &part_ : nullptr;
      part_key_ = key;
    } else {
      value_ = open_.back()->try_add(key);
    }
    if (value_ == nullptr) return fail(reached() - 1, "duplicate key '" + name_of(key) + "'");
    return count();
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) {
    return fail(static_cast<Index>(position) - 1, shortened(error.what()));
  }

 private:
  Index reached() const { return reached_ - text_.data(); }

  // Returns the number that the string just parsed stands for, or null if it is a real string.
  const double* python_number() const {
    if (!python_) return nullptr;
    const auto found = python_->ends.find(reached());
    return found == python_->ends.end() ? nullptr : &found->second;
  }

  Status refuse(Index offset, const std::string& what) const {
    offset = std::clamp<Index>(offset, 0, std::ssize(text_));
    return corrupt(at(path_, base_ + offset) + ": " + what);
  }

  bool fail(Index offset, const std::string& what) {
    error_ = refuse(offset, what).error();
    return false;
  }

  bool count() {
    if (++held_ <= limits_.values) return true;
    return fail(reached() - 1, "expected at most " + count_of(limits_.values, "value"));
  }

  // Stores a value at the current position.
  Json* place(Json value) {
    if (open_.empty()) return &(root_ = std::move(value));
    if (is_in_parts()) return &(part_ = std::move(value));
    if (open_.back()->is_array()) return &open_.back()->add_item(std::move(value));
    return &(*value_ = std::move(value));
  }

  bool add(Json value) {
    if (member_ && open_.empty()) return fail(reached() - 1, "expected an object, got " + std::string(value.kind()));
    Json* placed = place(std::move(value));
    return count() && finish(placed);
  }

  bool open(Json value) {
    if (member_ && open_.empty() && !value.is_object()) return fail(reached() - 1, "expected an object, got an array");
    if (static_cast<int>(open_.size()) == limits_.depth)
      return fail(reached() - 1, "expected at most " + count_of(limits_.depth, "level") + " of nesting");
    open_.push_back(place(std::move(value)));
    return count();
  }

  bool close() {
    Json* closed = open_.back();
    open_.pop_back();
    return finish(closed);
  }

  // Returns whether the enclosing container is the one whose parts are passed on.
  bool is_in_parts() const { return parts_ && open_.size() == 2 && last_key_ == parts_->name; }

  // Passes a finished member of the root, or a part of it, to the caller. Its key is kept to detect duplicates.
  bool finish(Json* value) {
    if (is_in_parts()) return pass_on(parts_->part, part_key_, value);
    if (!member_ || open_.size() != 1) return true;
    return pass_on(*member_, last_key_, value);
  }

  bool pass_on(const OnJsonMember& to, const std::string& key, Json* value) {
    if (Status status = to(key, std::exchange(*value, Json())); !status) {
      error_ = std::move(status).error();
      return false;
    }
    held_ = keys_.size() + part_keys_.size();
    return true;
  }

  std::optional<WithPythonNumbers> python_;  // set if the text contains such words
  std::string_view text_;
  std::string_view path_;
  Index base_;
  const JsonLimits& limits_;
  const OnJsonMember* member_;  // null: build the whole value
  const JsonParts* parts_;      // null: pass on whole members
  const char* reached_ = nullptr;
  Json root_;
  std::vector<Json*> open_;  // the enclosing containers, outermost first; only the last one changes
  Json* value_ = nullptr;    // the slot for the value of the last key
  KeySet keys_;              // of the root, if its members are passed on
  std::string last_key_;     // of the root
  Json value_of_root_;       // the value of last_key_
  KeySet part_keys_;         // of the member whose parts are passed on
  std::string part_key_;     // empty in an array
  Json part_;                // the value of part_key_
  Index held_ = 0;
  bool is_at_end_ = false;  // reached JsonLimits::until
  std::optional<Error> error_;
};

}  // namespace

Result<Json> parse_json(std::string_view text, std::string_view path, const JsonLimits& limits, Index base) {
  return Builder(text, path, base, limits, nullptr).run();
}

Status parse_json_members(std::string_view text, std::string_view path, const OnJsonMember& member,
                          const JsonLimits& limits, Index base) {
  TRY(Builder(text, path, base, limits, &member).run());
  return {};
}

Status parse_json_parts(std::string_view text, std::string_view path, const OnJsonMember& member,
                        const JsonParts& parts, const JsonLimits& limits, Index base) {
  TRY(Builder(text, path, base, limits, &member, &parts).run());
  return {};
}

// ---- Writing

namespace {

void append_double(std::string& out, double value, bool for_python) {
  if (!std::isfinite(value)) {
    out += !for_python ? "null" : std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
    return;
  }
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  const std::string_view text(digits, end - digits);
  out += text;
  if (text.find_first_of(".e") == std::string_view::npos) out += ".0";  // so that it does not read back as an integer
}

class Printer {
 public:
  Printer(std::string& out, int indent, int depth = 0, bool for_python = false)
      : out_(out), indent_(indent), depth_(indent * depth), for_python_(for_python) {}

  void print(const Json& value) {
    if (value.is_object()) {
      const auto members = *value.as_object();
      sequence('{', '}', members.size(), [&](std::size_t i) { print(members[i]); });
    } else if (value.is_array()) {
      const auto items = *value.as_array();
      sequence('[', ']', items.size(), [&](std::size_t i) { print(items[i]); });
    } else {
      print_scalar(value);
    }
  }

  // Prints an object with one more member, a list. Calls `done` after each item.
  void print(const Json& object, const JsonList& list, const std::function<void()>& done) {
    const auto members = *object.as_object();
    sequence('{', '}', members.size() + 1, [&](std::size_t i) {
      if (i < members.size()) return print(members[i]);
      print_key(list.key);
      sequence('[', ']', list.size, [&](std::size_t k) {
        print(list.item(k));
        done();
      });
    });
  }

 private:
  void print_key(std::string_view key) {
    append_json_string(out_, key);
    out_ += indent_ > 0 ? ": " : ":";
  }

  void print(const Json::Member& member) {
    print_key(member.key);
    print(member.value);
  }

  void print_scalar(const Json& value) {
    if (value.is_null()) {
      out_ += "null";
    } else if (value.is_bool()) {
      out_ += *value.as_bool() ? "true" : "false";
    } else if (value.is_string()) {
      append_json_string(out_, *value.as_string());
    } else if (!value.is_integer()) {
      append_double(out_, *value.as_double(), for_python_);
    } else if (const Result<Index> integer = value.as_index()) {
      out_ += std::to_string(*integer);
    } else {
      out_ += std::to_string(*value.as_uint64());
    }
  }

  template <class Print>
  void sequence(char open, char close, std::size_t n, Print print_item) {
    out_ += open;
    depth_ += indent_;
    for (std::size_t i = 0; i < n; ++i) {
      if (i > 0) out_ += ',';
      new_line();
      print_item(i);
    }
    depth_ -= indent_;
    if (n > 0) new_line();
    out_ += close;
  }

  void new_line() {
    if (indent_ > 0) out_.append(1, '\n').append(static_cast<std::size_t>(depth_), ' ');
  }

  std::string& out_;
  int indent_;
  int depth_;  // in spaces
  bool for_python_;
};

}  // namespace

std::string to_text(const Json& value, int indent, int depth) {
  std::string out;
  Printer(out, indent, depth).print(value);
  return out;
}

std::string python_text(const Json& value) {
  std::string out;
  Printer(out, 2, 0, true).print(value);
  return out + "\n";
}

void write_text(const Json& object, const JsonList& list, int indent,
                const std::function<void(std::string_view)>& write) {
  std::string out;
  const auto hand_on = [&] {
    write(out);
    out.clear();
  };
  Printer(out, indent).print(object, list, hand_on);
  hand_on();
}

void append_json_string(std::string& out, std::string_view text) {
  if (!is_utf8(text)) return append_json_string(out, valid_utf8(text));
  const auto is_plain = [](char c) { return c != '"' && c != '\\' && static_cast<unsigned char>(c) >= 0x20; };
  out += '"';
  while (!text.empty()) {
    const std::size_t plain = std::find_if_not(text.begin(), text.end(), is_plain) - text.begin();
    out += text.substr(0, plain);
    if (plain == text.size()) break;
    const char c = text[plain];
    text.remove_prefix(plain + 1);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned char>(c));
      out += escape;
    }
  }
  out += '"';
}

bool is_utf8(std::string_view text) {
  // The lead byte determines the length. Its range for the first continuation byte excludes overlong forms and
  // surrogates.
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = [&](std::size_t k) { return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0u; };
    const unsigned lead = byte(0);
    std::size_t more = 0;
    unsigned low = 0x80, high = 0xbf;  // range of the first continuation byte
    if (lead < 0x80) {
      more = 0;
    } else if (lead >= 0xc2 && lead <= 0xdf) {
      more = 1;
    } else if (lead >= 0xe0 && lead <= 0xef) {
      more = 2;
      if (lead == 0xe0) low = 0xa0;
      if (lead == 0xed) high = 0x9f;
    } else if (lead >= 0xf0 && lead <= 0xf4) {
      more = 3;
      if (lead == 0xf0) low = 0x90;
      if (lead == 0xf4) high = 0x8f;
    } else {
      return false;
    }
    if (more > 0 && (byte(1) < low || byte(1) > high)) return false;
    for (std::size_t k = 2; k <= more; ++k)
      if (byte(k) < 0x80 || byte(k) > 0xbf) return false;
    i += more + 1;
  }
  return true;
}

std::string valid_utf8(std::string_view text) {
  if (is_utf8(text)) return std::string(text);
  std::string out;
  for (const char c : text) {
    char hex[8];
    std::snprintf(hex, sizeof hex, "\\x%02x", static_cast<unsigned char>(c));
    out += static_cast<unsigned char>(c) < 0x80 ? std::string(1, c) : std::string(hex);
  }
  return out;
}

}  // namespace reshard
