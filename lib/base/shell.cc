// SPDX-License-Identifier: Apache-2.0
#include "lib/base/shell.h"

#include <algorithm>

#include "lib/base/text.h"

namespace reshard {
namespace {

bool is_plain(char c) {
  constexpr std::string_view kPlain = "_./:@%+,-";
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         kPlain.find(c) != std::string_view::npos || static_cast<unsigned char>(c) >= 0x80;
}

// Returns the inside of $'...': every byte that is not printable ASCII becomes \xNN.
std::string escaped(std::string_view word) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (const char c : word) {
    const auto code = static_cast<unsigned char>(c);
    if (code >= 0x20 && code < 0x7f && c != '\'' && c != '\\')
      out += c;
    else
      out += {'\\', 'x', kHex[code >> 4], kHex[code & 0xf]};
  }
  return out;
}

}  // namespace

std::string shell_word(std::string_view word) {
  if (printable(word) != word) return "$'" + escaped(word) + "'";
  if (!word.empty() && std::all_of(word.begin(), word.end(), is_plain)) return std::string(word);
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string shell_path(std::string_view path) {
  return shell_word(path.starts_with('-') ? "./" + std::string(path) : std::string(path));
}

}  // namespace reshard
