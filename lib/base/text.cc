// SPDX-License-Identifier: Apache-2.0
#include "lib/base/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <iterator>

#include "lib/base/printable.h"

namespace reshard {

std::string with_commas(Index n) {
  std::string s = std::to_string(n);
  const std::size_t first = s.front() == '-' ? 1 : 0;
  for (std::size_t i = s.size(); i > first + 3;) s.insert(i -= 3, ",");
  return s;
}

std::string count_of(Index n, std::string_view noun) {
  std::string out = with_commas(n) + " " + std::string(noun);
  if (n == 1) return out;
  const auto is_at = [&](std::size_t back, std::string_view letters) {
    return noun.size() >= back && letters.find(noun[noun.size() - back]) != std::string_view::npos;
  };
  if (is_at(1, "y") && !is_at(2, "aeou")) return out.replace(out.size() - 1, 1, "ies");
  return out + (is_at(1, "sx") || noun.ends_with("ch") || noun.ends_with("sh") ? "es" : "s");
}

std::string bytes_of(std::uint64_t n) { return std::to_string(n) + (n == 1 ? " byte" : " bytes"); }

std::string human_bytes(Index n) {
  static constexpr std::array<const char*, 6> kUnits = {"kB", "MB", "GB", "TB", "PB", "EB"};
  if (n < 1000) return std::to_string(n) + " B";
  double v = static_cast<double>(n);
  std::size_t unit = 0;
  for (v /= 1000; v >= 999.5 && unit + 1 < kUnits.size(); ++unit) v /= 1000;
  char out[32];
  std::snprintf(out, sizeof out, "%.*f %s", v < 9.995 ? 2 : v < 99.95 ? 1 : 0, v, kUnits[unit]);
  return out;
}

std::string human_seconds(double s) {
  char out[32];
  if (s < 0.0995) {
    std::snprintf(out, sizeof out, "%.0f ms", 1e3 * s);
  } else if (s < 59.95) {
    std::snprintf(out, sizeof out, "%.1f s", s);
  } else {
    const long whole = std::lround(s);
    std::snprintf(out, sizeof out, "%ld m %02ld s", whole / 60, whole % 60);
  }
  return out;
}

Result<Index> parse_bytes(std::string_view text) {
  struct Unit {
    std::string_view suffix;
    Index factor;
  };
  static constexpr std::array<Unit, 13> kUnits = {{{"", 1},
                                                   {"B", 1},
                                                   {"kB", 1'000},
                                                   {"KB", 1'000},
                                                   {"MB", 1'000'000},
                                                   {"GB", 1'000'000'000},
                                                   {"TB", 1'000'000'000'000},
                                                   {"KiB", Index{1} << 10},
                                                   {"MiB", Index{1} << 20},
                                                   {"GiB", Index{1} << 30},
                                                   {"TiB", Index{1} << 40},
                                                   {"M", 1'000'000},
                                                   {"G", 1'000'000'000}}};
  const std::size_t digits = text.find_first_not_of("0123456789.");
  const std::string number(text.substr(0, digits));
  std::string_view suffix = digits == std::string_view::npos ? "" : text.substr(digits);
  while (suffix.starts_with(' ')) suffix.remove_prefix(1);
  const Error bad = usage_error("'" + printable(text) + "' is not a size; write one like 256MiB, 5GB or 1000");
  double value = 0;
  const auto parsed = std::from_chars(number.data(), number.data() + number.size(), value);
  if (number.empty() || parsed.ec != std::errc() || parsed.ptr != number.data() + number.size()) return bad;
  for (const Unit& u : kUnits) {
    if (u.suffix != suffix) continue;
    const double bytes = value * static_cast<double>(u.factor);
    if (!(bytes < 9e18)) return bad;
    return static_cast<Index>(bytes);
  }
  return bad;
}

namespace {

// A number at the front of `text` and its digits; nothing if it is not in canonical form.
struct Number {
  Index value = 0;
  std::size_t digits = 0;
};
std::optional<Number> leading_number(std::string_view text) {
  constexpr std::size_t kMaxDigits = 18;
  Number n;
  while (n.digits < text.size() && text[n.digits] >= '0' && text[n.digits] <= '9') {
    if (++n.digits > kMaxDigits) return std::nullopt;
    n.value = n.value * 10 + (text[n.digits - 1] - '0');
  }
  if (n.digits == 0 || (n.digits > 1 && text[0] == '0')) return std::nullopt;
  return n;
}

// Returns whether a list of ranges such as "0..15,20" contains `value`, or nothing if it is not a list of ranges.
std::optional<bool> ranges_contain(std::string_view list, Index value) {
  bool contains = false;
  while (true) {
    const auto first = leading_number(list);
    if (!first) return std::nullopt;
    list.remove_prefix(first->digits);
    Index last = first->value;
    if (list.starts_with("..")) {
      list.remove_prefix(2);
      const auto end = leading_number(list);
      if (!end) return std::nullopt;
      list.remove_prefix(end->digits);
      last = end->value;
    }
    contains = contains || (first->value <= value && value <= last);
    if (list.empty()) return contains;
    if (list[0] != ',') return std::nullopt;
    list.remove_prefix(1);
  }
}

// A Unicode character and its length in UTF-8.
struct Character {
  char32_t code = 0;
  std::size_t bytes = 1;
};
// Returns the UTF-8 character at the front of `text`, or nothing if its first byte is not a valid start.
std::optional<Character> first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return Character{lead, 1};
  Character c;
  c.bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < c.bytes) return std::nullopt;
  c.code = lead & (0x7fu >> c.bytes);
  for (std::size_t i = 1; i < c.bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return std::nullopt;
    c.code = c.code << 6 | (byte(i) & 0x3fu);
  }
  const bool is_overlong = (c.bytes == 3 && c.code < 0x800) || (c.bytes == 4 && c.code < 0x10000);
  if (is_overlong || (c.code >= 0xd800 && c.code < 0xe000) || c.code > 0x10ffff) return std::nullopt;
  return c;
}

// The number of bytes that one pattern element consumes of the pattern and of the name.
struct Step {
  std::size_t pattern = 1;
  std::size_t name = 0;  // 0: the element does not match
};

// Returns the character at `at`. A byte that is not the start of a UTF-8 character counts as a character that only
// equals the same byte.
Character character_at(std::string_view text, std::size_t at) {
  constexpr char32_t kNotUnicode = 0x110000;
  const auto c = first_character(text.substr(at));
  return c ? *c : Character{kNotUnicode + static_cast<unsigned char>(text[at]), 1};
}

// Matches `c` against the set "[...]" at the front of `pattern`, as fnmatch does: "!" or "^" in front negates, "a-z" is
// a range, "]" in front and "-" at either end stand for themselves. Returns nothing if no "]" closes the set.
struct SetMatch {
  std::size_t length = 0;  // of the set, in bytes of the pattern
  bool matches = false;
};
std::optional<SetMatch> match_set(std::string_view pattern, char32_t c) {
  std::size_t at = 1;
  const bool negated = at < pattern.size() && (pattern[at] == '!' || pattern[at] == '^');
  if (negated) ++at;
  bool contains = false;
  for (const std::size_t first = at; at < pattern.size();) {
    if (pattern[at] == ']' && at > first) return SetMatch{at + 1, contains != negated};
    const Character low = character_at(pattern, at);
    at += low.bytes;
    Character high = low;
    if (at + 1 < pattern.size() && pattern[at] == '-' && pattern[at + 1] != ']') {
      high = character_at(pattern, at + 1);
      at += 1 + high.bytes;
    }
    contains = contains || (low.code <= c && c <= high.code);
  }
  return std::nullopt;
}

// Matches the pattern element at p, which is not a '*', against `name` at n.
Step match_element(std::string_view pattern, std::size_t p, std::string_view name, std::size_t n) {
  const char open = pattern[p];
  const Character c = character_at(name, n);
  if (open == '[') {
    if (const auto set = match_set(pattern.substr(p), c.code)) return {set->length, set->matches ? c.bytes : 0};
  }
  const std::size_t close = open == '{' ? pattern.find('}', p + 1) : pattern.npos;
  if (close != pattern.npos) {
    const auto is_digit = [](char digit) { return digit >= '0' && digit <= '9'; };
    const auto number = n > 0 && is_digit(name[n - 1]) ? std::nullopt : leading_number(name.substr(n));
    if (!number && name[n] != open) return {};
    const std::string_view inside = pattern.substr(p + 1, close - p - 1);
    if (const auto contains = ranges_contain(inside, number ? number->value : 0))
      return {close + 1 - p, number && *contains ? number->digits : 0};
  }
  if (open == '?') return {1, c.bytes};
  return {1, open == name[n] ? std::size_t{1} : std::size_t{0}};
}

}  // namespace

bool glob_match(std::string_view pattern, std::string_view name) {
  std::size_t p = 0, n = 0;
  std::size_t star = std::string_view::npos, star_name = 0;  // where to resume after the last '*'
  while (n < name.size()) {
    Step step;
    if (p < pattern.size()) {
      if (pattern[p] == '*') {
        star = p++;
        star_name = n;
        continue;
      }
      step = match_element(pattern, p, name, n);
    }
    if (step.name > 0) {
      p += step.pattern;
      n += step.name;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      star_name += character_at(name, star_name).bytes;
      n = star_name;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

std::string glob_escaped(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (c == '*' || c == '?' || c == '[' || c == '{')
      out += {'[', c, ']'};
    else
      out += c;
  }
  return out;
}

bool any_glob_matches(const std::vector<std::string>& patterns, std::string_view name) {
  for (const std::string& p : patterns)
    if (glob_match(p, name)) return true;
  return false;
}

namespace {

// Ranges of characters that a terminal interprets or does not show: controls (C0, DEL, C1), line separators, and
// Unicode's default ignorable characters, such as bidirectional marks and zero-width characters.
struct CharacterRange {
  char32_t first, last;
};
constexpr CharacterRange kUnprintable[] = {
    {0x0, 0x1f},      {0x7f, 0x9f},     {0xad, 0xad},       {0x34f, 0x34f},     {0x61c, 0x61c},
    {0x115f, 0x1160}, {0x17b4, 0x17b5}, {0x180b, 0x180f},   {0x200b, 0x200f},   {0x2028, 0x202e},
    {0x2060, 0x206f}, {0x2800, 0x2800}, {0x3164, 0x3164},   {0xfe00, 0xfe0f},   {0xfeff, 0xfeff},
    {0xffa0, 0xffa0}, {0xfff0, 0xfffb}, {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0000, 0xe0fff}};

bool is_printable(char32_t c) {
  const auto contains = [c](const CharacterRange& r) { return r.first <= c && c <= r.last; };
  return std::none_of(std::begin(kUnprintable), std::end(kUnprintable), contains);
}

// Passes `text` to `out` in pieces. Unprintable bytes go to `escape`, with the character they encode, if any. Allocates
// no memory.
template <typename Out, typename Escape>
void write_escaped(std::string_view text, const Out& out, const Escape& escape) {
  while (!text.empty()) {
    const std::size_t plain =
        std::find_if_not(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7f; }) - text.begin();
    if (plain > 0) out(text.substr(0, plain));
    text.remove_prefix(plain);
    if (text.empty()) break;
    const auto c = first_character(text);
    const std::string_view bytes = text.substr(0, c ? c->bytes : 1);
    text.remove_prefix(bytes.size());
    if (c && is_printable(c->code))
      out(bytes);
    else
      escape(bytes, c);
  }
}

template <typename Out>
void write_hex_bytes(std::string_view bytes, const Out& out) {
  constexpr std::string_view kHex = "0123456789abcdef";
  for (const char byte : bytes) {
    const auto code = static_cast<unsigned char>(byte);
    const char escape[] = {'\\', 'x', kHex[code >> 4], kHex[code & 0xf]};
    out(std::string_view(escape, sizeof escape));
  }
}

// Passes a message to `out`, escaped like printable() but with its line breaks.
template <typename Out>
void write_lines(std::string_view text, const Out& out) {
  write_escaped(text, out, [&](std::string_view bytes, const std::optional<Character>&) {
    if (bytes == "\n")
      out(bytes);
    else
      write_hex_bytes(bytes, out);
  });
}

}  // namespace

std::string printable(std::string_view name) {
  std::string out;
  out.reserve(name.size());
  const auto append = [&](std::string_view piece) { out += piece; };
  write_escaped(name, append,
                [&](std::string_view bytes, const std::optional<Character>&) { write_hex_bytes(bytes, append); });
  return out;
}

std::string printable_lines(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  write_lines(text, [&](std::string_view piece) { out += piece; });
  return out;
}

void print_lines(std::FILE* to, std::string_view text) {
  write_lines(text, [to](std::string_view piece) { std::fwrite(piece.data(), 1, piece.size(), to); });
}

std::string printable_json(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  const auto append = [&](std::string_view piece) { out += piece; };
  const auto append_unit = [&](char32_t unit) {
    char escape[16];
    std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(unit));
    out += escape;
  };
  write_escaped(text, append, [&](std::string_view bytes, const std::optional<Character>& c) {
    if (bytes == "\n" || !c) {
      out += c ? bytes : "\xef\xbf\xbd";  // U+FFFD for invalid bytes
    } else if (c->code < 0x10000) {
      append_unit(c->code);
    } else {
      append_unit(0xd800 + ((c->code - 0x10000) >> 10));
      append_unit(0xdc00 + ((c->code - 0x10000) & 0x3ff));
    }
  });
  return out;
}

std::string tensor_text(std::string_view name) { return "tensor '" + printable(name) + "'"; }

bool take(std::string_view& text, std::string_view beginning) {
  if (!text.starts_with(beginning)) return false;
  text.remove_prefix(beginning.size());
  return true;
}

std::optional<Index> take_number(std::string_view& text) {
  Index n = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), n);
  if (parsed.ec != std::errc() || n < 0) return std::nullopt;
  text.remove_prefix(parsed.ptr - text.data());
  return n;
}

std::optional<Index> parse_number(std::string_view text) {
  const auto n = take_number(text);
  return text.empty() ? n : std::nullopt;
}

bool is_digits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string out;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i) out += separator;
    out += parts[i];
  }
  return out;
}

bool is_safe_relative_path(std::string_view name) {
  if (name.empty() || name.front() == '/') return false;
  if (name.find('\0') != std::string_view::npos || name.find('\\') != std::string_view::npos) return false;
  while (true) {
    const std::size_t slash = name.find('/');
    const std::string_view part = name.substr(0, slash);
    if (part.empty() || part == "." || part == "..") return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

}  // namespace reshard
