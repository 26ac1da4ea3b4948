// Numbers and names as people read them: "3.00 GB", "128,256", globs, and names from files made safe for a terminal.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

std::string with_commas(Index n);                      // 1498482688 -> "1,498,482,688"
std::string count_of(Index n, std::string_view noun);  // "1,024 tensors", "1 tensor"
std::string bytes_of(std::uint64_t n);                 // "4096 bytes", "1 byte": digits as offsets have them
std::string human_bytes(Index n);                      // decimal units, three digits: "3.00 GB", "864 B"
std::string human_seconds(double s);                   // "0.4 s", "1 m 20 s"
Result<Index> parse_bytes(std::string_view text);  // "5GB", "256MiB", "1000"; the units are SI or IEC, case as written

// Shell-style match of a whole name: * any run, ? one character, [abc] one of, {0..15,20} a whole number in one of the
// ranges (up to 18 digits, none of them a leading zero), as folded names have it. No special treatment of '.' or '/'.
bool glob_match(std::string_view pattern, std::string_view name);
// The pattern that matches `name` alone.
std::string glob_escaped(std::string_view name);
bool any_glob_matches(const std::vector<std::string>& patterns, std::string_view name);

// Control bytes as \xNN, so that a hostile name cannot steer the terminal.
std::string printable(std::string_view name);

// "tensor 'NAME'", as messages have it.
std::string tensor_text(std::string_view name);

// Off the front of `text`, where it is there: a beginning; the digits of a whole number (leading zeros too).
bool take(std::string_view& text, std::string_view beginning);
std::optional<Index> take_number(std::string_view& text);
std::optional<Index> parse_number(std::string_view text);  // digits and nothing else: "007" is 7
bool is_digits(std::string_view text);                     // at least one, and nothing else

std::vector<std::string> split(std::string_view text, char separator);  // "a,,b" -> {"a", "", "b"}
std::string join(const std::vector<std::string>& parts, std::string_view separator);

}  // namespace reshard
