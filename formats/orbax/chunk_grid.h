// SPDX-License-Identifier: Apache-2.0
// How the arrays that are written are cut into chunks, and the keys of the chunks in a database.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/result.h"
#include "lib/checkpoint/format.h"
#include "lib/layout/box.h"
#include "lib/layout/layout.h"

namespace reshard::orbax {

// Returns the shape of a tensor's chunks: what one rank of the mesh holds, cut further into at most `limit` bytes. Only
// rows are cut unevenly, so that the padding of a chunk follows its elements.
Dims chunk_shape_of(const TargetTensor& tensor, const Mesh& mesh, Index limit);

// Returns the number of chunks in each dimension.
Dims counts_of(const Dims& shape, const Dims& grid);

// Calls `visit` with the key of each chunk, which begins with `key`, and with its row-major number, in the order of the
// keys. `separator` precedes the position in dimension `d`; `next` those in the dimensions after it.
template <class Visit>
Status each_key(const Dims& counts, int d, const std::string& key, std::string_view separator, std::string_view next,
                Index number, const Visit& visit) {
  if (d == counts.rank()) return visit(key, number);
  std::vector<std::string> texts;
  for (Index i = 0; i < counts[d]; ++i) texts.push_back(std::to_string(i));
  std::sort(texts.begin(), texts.end());
  for (const std::string& text : texts)
    TRY(each_key(counts, d + 1, key + std::string(separator) + text, next, next, number * counts[d] + std::stoll(text),
                 visit));
  return {};
}

// Returns whether all keys of array `a` come before those of `b`.
bool is_before(std::string_view a, std::string_view b);

}  // namespace reshard::orbax
