// SPDX-License-Identifier: Apache-2.0
#include "lib/base/choices.h"

#include <algorithm>
#include <utility>

#include "lib/base/text.h"

namespace reshard {
namespace {

// Returns the edit distance of two words: how many letters must be changed, added or removed.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({changed, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row.back();
}

// Returns the known word that is nearest to `word`, or nothing if none is near.
std::string_view nearest(std::string_view word, const std::vector<std::string>& known) {
  constexpr std::size_t kLongest = 100;  // no word that is known is as long; the distance takes quadratic time
  constexpr std::size_t kShortest = 3;   // letters that identify a name as its beginning
  constexpr std::size_t kLetters = 3;    // for each of which one letter may be wrong
  word = word.substr(0, word.find('='));
  std::pair best(word.size() / kLetters + 1, std::string_view());
  if (word.size() > kLongest) return {};
  for (const std::string& name : known) {
    const std::size_t letters = word.size() >= kShortest && name.starts_with(word) ? 0 : distance(word, name);
    if (letters < best.first) best = {letters, name};
  }
  return best.second;
}

}  // namespace

std::string near_name(std::string_view word, const std::vector<std::string>& known) {
  const std::string_view name = nearest(word, known);
  return name.empty() ? "" : "; did you mean " + std::string(name) + "?";
}

std::string choices_text(std::string_view word, const std::vector<std::string>& choices) {
  const std::string meant = near_name(word, choices);
  return (meant.empty() ? "; choose one of: " : meant + " Choose one of: ") + join(choices, ", ");
}

}  // namespace reshard
