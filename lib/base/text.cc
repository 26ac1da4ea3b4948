#include "lib/base/text.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace reshard {

std::string with_commas(Index n) {
  std::string s = std::to_string(n);
  const std::size_t first = s.front() == '-' ? 1 : 0;
  for (std::size_t i = s.size(); i > first + 3;) s.insert(i -= 3, ",");
  return s;
}

std::string count_of(Index n, std::string_view noun) {
  return with_commas(n) + " " + std::string(noun) + (n == 1 ? "" : "s");
}

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
  if (s < 59.95) {
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

bool glob_match(std::string_view pattern, std::string_view name) {
  std::size_t p = 0, n = 0;
  std::size_t star = std::string_view::npos, star_name = 0;  // where to take up again after the last '*'
  while (n < name.size()) {
    bool matched = false;
    std::size_t next = p + 1;
    if (p < pattern.size()) {
      const std::size_t close = pattern[p] == '[' ? pattern.find(']', p + 1) : std::string_view::npos;
      if (pattern[p] == '*') {
        star = p++;
        star_name = n;
        continue;
      }
      if (close != std::string_view::npos) {
        matched = pattern.substr(p + 1, close - p - 1).find(name[n]) != std::string_view::npos;
        next = close + 1;
      } else {
        matched = pattern[p] == '?' || pattern[p] == name[n];
      }
    }
    if (matched) {
      p = next;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++star_name;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

bool any_glob_matches(const std::vector<std::string>& patterns, std::string_view name) {
  for (const std::string& p : patterns)
    if (glob_match(p, name)) return true;
  return false;
}

std::string printable(std::string_view name) {
  std::string out;
  out.reserve(name.size());
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f) {
      out += c;
    } else {
      char hex[8];
      std::snprintf(hex, sizeof hex, "\\x%02x", byte);
      out += hex;
    }
  }
  return out;
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

std::string dims_text(const std::vector<Index>& dims) {
  std::string out = "[";
  for (std::size_t i = 0; i < dims.size(); ++i) {
    if (i) out += ", ";
    out += std::to_string(dims[i]);
  }
  return out + "]";
}

}  // namespace reshard
