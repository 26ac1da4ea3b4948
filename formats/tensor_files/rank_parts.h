// SPDX-License-Identifier: Apache-2.0
// Files that each hold what one rank had: which ranks are missing, and the ranks' parts of each tensor.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "formats/encoding/stored_tensor.h"

namespace reshard {

// What one rank stores of a tensor.
struct RankPart {
  Index rank = 0;
  StoredTensor stored;  // with its file
};

// The parts of each tensor, grouped by name.
class RankParts {
 public:
  struct Parts {
    std::string name;
    std::vector<RankPart> parts;  // at least one, in ascending order of rank

    const RankPart& first() const { return parts.front(); }
    // Returns the part of a rank, or null if the rank has none.
    const RankPart* of(Index rank) const;
  };

  // Adds a part of the tensor `name`; ranks must come in ascending order. Returns false if the rank already has one.
  bool add(const std::string& name, Index rank, const Fragment& stored, DType dtype);

  // Returns all tensors in the order in which their first parts were added.
  const std::vector<Parts>& all() const { return all_; }
  // Returns the parts of a tensor, or null if no rank has it.
  const Parts* find(std::string_view name) const;

 private:
  std::vector<Parts> all_;
  std::unordered_map<std::string, std::size_t> number_;  // by name
};

// Fails with kIo if `files`, by rank, lacks a rank below its highest one. Does not notice that the last ranks are
// missing.
Status check_no_gap(const std::map<Index, std::string>& files);

}  // namespace reshard
