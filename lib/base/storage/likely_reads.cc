// SPDX-License-Identifier: Apache-2.0
#include "lib/base/storage/likely_reads.h"

#include <algorithm>
#include <cctype>
#include <utility>

namespace reshard {
namespace {

constexpr std::size_t kMostSmall = 16;        // objects that are fetched with a small one
constexpr std::size_t kMostUnnumbered = 4;    // objects in a row whose first members count as metadata
constexpr std::size_t kMostReads = 256;       // that are remembered of an object
constexpr std::size_t kMostRanges = 512;      // of a guess
constexpr Index kMostWindow = 32;             // objects
constexpr Index kSmallDirectory = 4;          // objects
constexpr Index kLeastRead = Index{4} << 10;  // bytes

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

// Returns the key with each number replaced by what `replace` makes of its digits.
template <class Replace>
std::string with_numbers(const std::string& key, Replace replace) {
  std::string out;
  for (std::size_t i = 0; i < key.size();) {
    std::size_t end = i;
    while (end < key.size() && is_digit(key[end])) ++end;
    if (end > i)
      out += replace(key.substr(i, end - i));
    else
      out += key[end++];
    i = end;
  }
  return out;
}

std::string directory_of(const std::string& key) { return key.substr(0, key.rfind('/') + 1); }  // npos + 1 is 0

// Returns the key without its numbers and, in a small directory, without the directory's name.
std::string row_of(const std::string& key, Index objects_in_directory) {
  const auto number = [](const std::string&) { return "#"; };
  const std::string directory = directory_of(key);
  if (directory.empty() || objects_in_directory > kSmallDirectory) return with_numbers(key, number);
  const std::string above = directory_of(directory.substr(0, directory.size() - 1));
  return with_numbers(above, number) + "*/" + with_numbers(key.substr(directory.size()), number);
}

std::string ordered(const std::string& key) {
  constexpr std::size_t kDigits = 20;
  return with_numbers(key, [&](const std::string& digits) {
    return std::string(kDigits - std::min(kDigits, digits.size()), '0') + digits;
  });
}

}  // namespace

void LikelyReads::set_objects(std::vector<Object> objects) {
  known_.clear();
  for (auto& [name, row] : rows_) row.objects.clear();
  std::map<std::string, Index> counts;  // of objects, by directory
  for (const Object& object : objects) ++counts[directory_of(object.key)];
  for (Object& object : objects) {
    const std::string row = row_of(object.key, counts[directory_of(object.key)]);
    known_[object.key] = {object.size, row};
    rows_[row].objects[ordered(object.key)] = std::move(object);
  }
}

// Adds the small objects in the directory of one and below it, except members of long rows, which hold data.
void LikelyReads::add_small(const Object& like, std::vector<Range>& out) {
  const std::string directory = directory_of(like.key);
  if (like.size > kSmallObject || directory.empty() || !directories_.insert(directory).second) return;
  for (auto at = known_.lower_bound(directory); at != known_.end() && at->first.starts_with(directory); ++at) {
    const std::string& key = at->first;
    const Index size = at->second.size;
    if (out.size() == kMostSmall) return;
    if (key == like.key || size == 0 || size > kSmallObject) continue;
    Row& row = rows_[at->second.row];
    if (row.objects.size() <= kMostUnnumbered && row.guessed.insert(key).second) out.push_back({{key, size}, 0, size});
  }
}

// Adds the parts of an object that were read of the one in its row that tells most. Beginnings and ends are alike in
// all of them, other parts only in objects of the same size. Leaves out what is in `but`.
void LikelyReads::add_alike(const Row& row, const Object& object, const std::vector<Range>& but,
                            std::vector<Range>& out) const {
  std::vector<Range> best;
  for (const auto& [key, reads] : row.read) {
    if (key == object.key || reads.size() <= best.size()) continue;
    std::vector<Range> parts;
    for (const Range& read : reads) {
      const Index from_end = read.object.size - read.offset;
      Range part{object, read.offset, std::max(read.length, kLeastRead)};
      if (read.offset < kSmallObject)
        part = {object, 0, kSmallObject};
      else if (read.length == from_end && from_end <= object.size)
        part.offset = object.size - from_end;
      else if (read.object.size != object.size)
        continue;
      part.length = std::min(part.length, object.size - part.offset);
      if (part.length > 0) parts.push_back(std::move(part));
    }
    if (parts.size() > best.size()) best = std::move(parts);
  }
  std::erase_if(best, [&](const Range& part) {
    return std::any_of(but.begin(), but.end(), [&](const Range& there) {
      return there.offset <= part.offset && part.offset < there.offset + std::max(there.length, kLeastRead);
    });
  });
  out.insert(out.end(), best.begin(), best.end());
}

std::vector<LikelyReads::Range> LikelyReads::after(const Range& read) {
  std::vector<Range> out;
  const Object& object = read.object;
  const auto known = known_.find(object.key);
  if (known == known_.end()) return out;
  add_small(object, out);
  Row& row = rows_[known->second.row];
  std::vector<Range>& own = row.read[object.key];
  const bool is_first = own.empty();
  if (own.size() < kMostReads) own.push_back(read);
  if (!is_first || row.read.size() < 2) return out;
  if (row.guessed.insert(object.key).second) add_alike(row, object, own, out);
  Index left = std::exchange(row.window, std::min(kMostWindow, 2 * row.window));
  for (auto next = row.objects.upper_bound(ordered(object.key));
       next != row.objects.end() && left > 0 && out.size() < kMostRanges; ++next) {
    const Object& other = next->second;
    if (row.read.contains(other.key) || !row.guessed.insert(other.key).second) continue;
    add_alike(row, other, {}, out);
    --left;
  }
  return out;
}

}  // namespace reshard
