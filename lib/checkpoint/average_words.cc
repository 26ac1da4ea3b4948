// SPDX-License-Identifier: Apache-2.0
#include "lib/checkpoint/average_words.h"

#include <algorithm>
#include <array>

namespace reshard {
namespace {

bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
bool is_lower(char c) { return c >= 'a' && c <= 'z'; }

}  // namespace

std::vector<std::string> words_in_name(std::string_view name) {
  std::vector<std::string> out(1);
  for (std::size_t i = 0; i < name.size(); ++i) {
    const char c = name[i];
    const bool begins =
        is_upper(c) && i > 0 &&
        (is_lower(name[i - 1]) || (is_upper(name[i - 1]) && i + 1 < name.size() && is_lower(name[i + 1])));
    const bool separates = c == '_' || c == '-' || c == '.';
    if ((begins || separates) && !out.back().empty()) out.emplace_back();
    if (!separates) out.back() += is_upper(c) ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return out;
}

bool hints_at_average(std::string_view word) {
  static constexpr std::array<std::string_view, 10> kWords = {"ema", "swa",    "ewma",     "shadow", "average",
                                                              "avg", "polyak", "averaged", "lawa",   "averaging"};
  const std::vector<std::string> parts = words_in_name(word);
  return std::find_first_of(parts.begin(), parts.end(), kWords.begin(), kWords.end()) != parts.end();
}

}  // namespace reshard
