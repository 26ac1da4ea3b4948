// SPDX-License-Identifier: Apache-2.0
// Finds names that differ only in their prefix. Models of no known family may have other names in memory than in files.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard {

struct Renaming {
  std::string a, b;                                        // "vit.layers.", "vit.encoder.layer."
  std::vector<std::pair<std::size_t, std::size_t>> pairs;  // tensors of equal shape, by index in the catalogs
};
// Matches the listed tensors of two catalogs by name: what follows the prefixes must be equal and have at least two
// components, and the numbers in the prefixes must be equal. Renamings of the most tensors come first, at most 64, and
// no tensor occurs twice.
std::vector<Renaming> find_renamings(const Catalog& a, std::vector<std::size_t> only_a, const Catalog& b,
                                     const std::vector<std::size_t>& only_b);

}  // namespace reshard
