// SPDX-License-Identifier: Apache-2.0
// Numbers and names as text for people: "3.00 GB", "128,256", globs, and untrusted names made safe for a terminal.
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
std::string bytes_of(std::uint64_t n);                 // "4096 bytes", "1 byte": without commas, like offsets
std::string human_bytes(Index n);                      // decimal units, three digits: "3.00 GB", "864 B"
std::string human_seconds(double s);                   // "0.4 s", "1 m 20 s"
// Parses "5GB", "256MiB" or "1000". Units are SI or IEC and case-sensitive.
Result<Index> parse_bytes(std::string_view text);

// Matches a whole name: * is any run of characters, ? one character, [abc] one of a set, and {0..15,20} a number in one
// of the ranges (up to 18 digits, no leading zero), as fold() writes them. '.' and '/' are not special.
bool glob_match(std::string_view pattern, std::string_view name);
// Returns the pattern that matches only `name`.
std::string glob_escaped(std::string_view name);
bool any_glob_matches(const std::vector<std::string>& patterns, std::string_view name);

// Escapes control and invisible characters as \xNN, so that an untrusted name cannot control the terminal.
std::string printable(std::string_view name);

// Returns "tensor 'NAME'", for messages.
std::string tensor_text(std::string_view name);

// take() removes `beginning` from the front of `text` and returns whether it was there. take_number() removes a decimal
// number, leading zeros included.
bool take(std::string_view& text, std::string_view beginning);
std::optional<Index> take_number(std::string_view& text);
std::optional<Index> parse_number(std::string_view text);  // only digits: "007" is 7
bool is_digits(std::string_view text);                     // at least one, and nothing else

std::vector<std::string> split(std::string_view text, char separator);  // "a,,b" -> {"a", "", "b"}
std::string join(const std::vector<std::string>& parts, std::string_view separator);

// Returns whether a name found inside a checkpoint (relative_path, weight_map) stays inside its directory: not empty,
// not absolute, no "..", no NUL, no backslash.
bool is_safe_relative_path(std::string_view name);

}  // namespace reshard
