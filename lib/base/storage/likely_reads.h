// SPDX-License-Identifier: Apache-2.0
// Guesses which parts of a store's objects are read next, so that they can be requested together. A checkpoint is read
// file by file, and each read waits for a round trip.
//
//   1. Metadata is in small objects. When one of them is read, the others in its directory and below are likely.
//   2. The files of ranks, layers and shards have names that differ in numbers alone, those of parameters are in small
//      directories, and they are laid out alike. When the second file of such a row is read, the same parts of the next
//      ones are likely. The window doubles with each guess, so that at most about as much is fetched in vain as was
//      useful.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "lib/base/checked.h"

namespace reshard {

// Not thread-safe.
class LikelyReads {
 public:
  struct Object {
    std::string key;
    Index size = 0;
  };
  struct Range {
    Object object;
    Index offset = 0, length = 0;
  };
  static constexpr Index kSmallObject = Index{64} << 10;  // bytes; also of what is read of a file's beginning

  // Replaces the list of objects that exist. Keeps what was learnt from reads.
  void set_objects(std::vector<Object> objects);
  // Returns what is likely to be read after this range. Returns each part of an object once.
  std::vector<Range> after(const Range& read);

 private:
  struct Known {
    Index size = 0;
    std::string row;  // key in rows_
  };
  // Objects that are laid out alike.
  struct Row {
    std::map<std::string, Object> objects;           // by key with padded numbers: in the order of reading
    std::map<std::string, std::vector<Range>> read;  // the reads of each object, by key
    std::set<std::string> guessed;                   // keys
    Index window = 2;                                // objects
  };
  void add_small(const Object& like, std::vector<Range>& out);
  void add_alike(const Row& row, const Object& object, const std::vector<Range>& but, std::vector<Range>& out) const;

  std::map<std::string, Known> known_;  // by key
  std::map<std::string, Row> rows_;
  std::set<std::string> directories_;  // whose small objects were returned
};

}  // namespace reshard
