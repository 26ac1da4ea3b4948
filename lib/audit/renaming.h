// Names that differ in nothing but what they begin with: of models of no known family, whose names in memory may be
// others than those in files.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard {

struct Renaming {
  std::string a, b;                                        // "vit.layers.", "vit.encoder.layer."
  std::vector<std::pair<std::size_t, std::size_t>> pairs;  // tensors of one shape, by their places in the catalogs
};
// Of the tensors of two catalogs that are listed, those that names tell to be the same: what follows has two parts at
// least, and the numbers before it are the same. Renamings of the most tensors come first, 64 at most, and no tensor
// comes twice.
std::vector<Renaming> find_renamings(const Catalog& a, std::vector<std::size_t> only_a, const Catalog& b,
                                     const std::vector<std::size_t>& only_b);

}  // namespace reshard
