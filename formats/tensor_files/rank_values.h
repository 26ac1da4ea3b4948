// A value that is no tensor, in the files of several ranks: what they have alike is kept once.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "formats/encoding/pickle.h"
#include "lib/checkpoint/catalog.h"

namespace reshard {

struct RankValues {
  KeyPath path;
  std::vector<std::string> pickles;                            // the different ones
  std::vector<std::pair<std::uint32_t, std::size_t>> holders;  // each file that has one, and which it is

  // Of the catalog's file `file`. False where the value is no plain data: it is left out.
  bool add(std::uint32_t file, const KeyPath& path, pickle::Value value);
  bool is_alike() const { return pickles.size() == 1; }
};

}  // namespace reshard
