// SPDX-License-Identifier: Apache-2.0
#include "lib/base/choices.h"

#include <algorithm>
#include <utility>

#include "lib/base/file.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

// Returns the edit distance of two words: how many letters must be changed, added or removed, or exchanged with the
// next one. rows[i][j] is the distance of the first i letters of `a` and the first j of `b`.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector rows(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t j = 0; j <= b.size(); ++j) rows[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    rows[i][0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t changed = rows[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      rows[i][j] = std::min({changed, rows[i - 1][j] + 1, rows[i][j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        rows[i][j] = std::min(rows[i][j], rows[i - 2][j - 2] + 1);
    }
  }
  return rows[a.size()][b.size()];
}

// Returns the known word that is nearest to `word`, or nothing if none is near.
std::string_view nearest(std::string_view word, const std::vector<std::string>& known) {
  constexpr std::size_t kLongest = 100;  // no word that is known is as long; the distance takes quadratic time
  constexpr std::size_t kShortest = 3;   // letters that identify a name as its beginning
  constexpr std::size_t kLetters = 3;    // one letter in so many may be wrong
  std::pair best(word.size() / kLetters + 1, std::string_view());
  if (word.size() > kLongest) return {};
  for (const std::string& name : known) {
    const bool is_exchanged = word.size() == 2 && name == std::string{word[1], word[0]};  // "fh" is "hf"
    const bool is_beginning = word.size() >= kShortest && name.starts_with(word);
    const bool is_free = is_exchanged || is_beginning;
    const std::size_t least = name.size() < word.size() ? word.size() - name.size() : name.size() - word.size();
    if (!is_free && least >= best.first) continue;  // spares most names of a large directory the distance
    const std::size_t letters = is_free ? 0 : distance(word, name);
    if (letters < best.first) best = {letters, name};
  }
  return best.second;
}

}  // namespace

std::string meant_text(std::string_view name) { return name.empty() ? "" : "; did you mean " + printable(name) + "?"; }

std::string near_name(std::string_view word, const std::vector<std::string>& known) {
  return meant_text(nearest(word, known));
}

namespace {

// Returns the first known word that abbreviates `word`: it has its first letter and further ones in order, as "hf" of
// "huggingface". Only such words of two or three letters are tried, as most others are no abbreviations.
std::string_view abbreviation(std::string_view word, const std::vector<std::string>& known) {
  constexpr std::size_t kLongest = 3, kLeast = 6;  // letters: of an abbreviation, and of a word that has one
  for (const std::string& name : known) {
    if (word.size() < kLeast || name.size() < 2 || name.size() > kLongest || name[0] != word[0]) continue;
    std::size_t next = 0;
    for (const char letter : word)
      if (next < name.size() && letter == name[next]) ++next;
    if (next == name.size()) return name;
  }
  return {};
}

}  // namespace

std::string choices_text(std::string_view word, const std::vector<std::string>& choices,
                         const std::vector<std::string>& others) {
  std::vector<std::string> all = choices;
  all.insert(all.end(), others.begin(), others.end());
  std::string meant = near_name(word, all);
  if (meant.empty()) meant = meant_text(abbreviation(word, all));
  return (meant.empty() ? "; choose one of: " : meant + " Choose one of: ") + join(choices, ", ");
}

std::string near_path(const std::string& path) {
  const auto exists = [](const std::string& at) {
    const auto answer = path_exists(at);
    return !answer.has_value() || *answer;  // what cannot be looked at may be there
  };
  const std::string plain = without_end_slashes(path);
  if (plain.empty() || is_url(plain) || exists(plain)) return "";
  const std::string parent = parent_path(plain), name = base_name(plain);
  if (!exists(parent)) {
    const std::string meant = near_path(parent);
    if (meant.empty()) return "";
    const std::string inside = path_join(meant, name);
    return exists(inside) ? inside : meant;
  }
  const auto entries = list_directory(parent);
  if (!entries) return "";
  std::vector<std::string> names;
  for (const DirectoryEntry& entry : *entries) names.push_back(entry.name);
  const std::string meant(nearest(name, names));
  return meant.empty() || plain.find('/') == std::string::npos ? meant : path_join(parent, meant);
}

}  // namespace reshard
