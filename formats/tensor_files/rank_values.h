// SPDX-License-Identifier: Apache-2.0
// Values that are not tensors, in the files of several ranks. Equal values are stored once.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "formats/encoding/pickle.h"
#include "lib/checkpoint/catalog.h"

namespace reshard {

// The values of one name on all ranks.
struct RankValues {
  KeyPath path;
  std::vector<std::string> pickles;                            // the distinct values
  std::vector<std::pair<std::uint32_t, std::size_t>> holders;  // each file with a value, and its index in `pickles`

  // Adds the value in the catalog's file `file`. Returns false and adds nothing if it is not plain data.
  bool add(std::uint32_t file, const KeyPath& path, pickle::Value value);
  // Returns whether all files have the same value.
  bool is_alike() const { return pickles.size() == 1; }
};

}  // namespace reshard
