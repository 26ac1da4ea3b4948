// Packed tensors: what a convention stores as one tensor and Hugging Face as another or as several. Unpacking moves
// nothing: each part is a tensor of its own over the bytes of the packed one.
//
//   q, k, v of a model with 2 key-value heads, packed by group:   [q0 q1 k0 v0 | q2 q3 k1 v1]   (rows of a head each)
//   gate and up as two sections:                                  [gate | up]
//   the experts' matrices, stacked:                               [E, rows, columns]
#pragma once

#include <span>
#include <string>
#include <vector>

#include "lib/model/family.h"

namespace reshard {

// `count` canonical rows from `canonical` on are the stored rows `stored`, `stored` + step, ...
struct RowSegment {
  Index canonical = 0;
  Index stored = 0;
  Index count = 0;
  Index step = 1;
};

// Where a part lies in the tensor it was packed into.
struct PackedPart {
  std::string name;              // canonical, without an optimizer key's prefix and suffix
  Dims shape;                    // of the part
  Index index = -1;              // of the part in a stacked tensor, along its first dimension; -1: not stacked
  std::vector<RowSegment> rows;  // ascending in the stored rows within a head; empty: the rows as they are
  bool transposed = false;       // after that, in its last two dimensions
  Index row_group = 1;           // of the part, as in Tensor
  Index first = 0;               // where it begins in the last dimension of `shape`, after all that
};

// The part as a tensor over the same bytes, of that name.
Tensor unpack(const Tensor& packed, const PackedPart& part, std::string name);

// The canonical names of the parts of a packed tensor. `experts` is how many a stacked one holds; more
// than any model has are left out.
std::vector<std::string> part_names(const ParsedName& name, Index experts);

// The parts of a tensor that a convention stores, of this shape (not of an optimizer's number: rank 0); one part where
// its rows are in rotary pairs and nothing is packed, and where it is a section: in the shape of the whole, of which it
// has a box. With `hf_rows` such rows come into Hugging Face's order, else
// they stay. `config` may be null where the form needs no head counts. Errors say what `what` (the tensor, for
// messages) should have been.
Result<std::vector<PackedPart>> parts_of(const ParsedName& name, const Dims& shape, const ModelConfig* config,
                                         bool hf_rows, const std::string& what);

// The shape of the packed tensor whose parts have these shapes, in the order of part_names(). Unsupported where they do
// not fit together; a usage error where it is a section and there is no config.
Result<Dims> packed_shape(const StoredRule& stored, std::span<const Dims> parts, const ModelConfig* config);

// A tensor that a convention stores, and the canonical tensors that it is made of.
struct PackedGroup {
  std::string name;
  const StoredRule* stored = nullptr;  // null: one tensor under its own name
  std::vector<std::size_t> parts;      // of the catalog's tensors, in the order of part_names()
};
// What a convention makes of some tensors of a canonical view, in the order of their first parts. Optimizer state goes
// with its parameter, and what has no name in the convention keeps its own. An error where a part of a tensor is not
// among them.
Result<std::vector<PackedGroup>> pack(const Family& family, Convention convention, const Catalog& view,
                                      const std::vector<std::size_t>& tensors);

// The canonical names of a key of a catalog, one for each part where it is a packed tensor's. Any key of an object too.
std::vector<std::string> canonical_keys(const Family& family, const Catalog& catalog, const ModelConfig* config,
                                        std::string_view key);

}  // namespace reshard
