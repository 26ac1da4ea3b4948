// SPDX-License-Identifier: Apache-2.0
// Packed tensors: tensors that a convention stores in another form than Hugging Face, or as one instead of several.
// Unpacking moves no data: each part is a tensor over the bytes of the packed one.
//
//   q, k, v of a model with 2 key-value heads, packed by group:   [q0 q1 k0 v0 | q2 q3 k1 v1]   (rows of a head each)
//   gate and up as two sections:                                  [gate | up]
//   the experts' matrices, stacked:                               [E, rows, columns]
#pragma once

#include <span>
#include <string>
#include <vector>

#include "lib/checkpoint/fragment_index.h"
#include "lib/model/family.h"

namespace reshard {

// `count` canonical rows from `canonical` on are the stored rows `stored`, `stored` + step, ...
struct RowSegment {
  Index canonical = 0;
  Index stored = 0;
  Index count = 0;
  Index step = 1;
};

// The position of a part in its packed tensor.
struct PackedPart {
  std::string name;              // canonical, without an optimizer key's prefix and suffix
  Dims shape;                    // of the part
  Index index = -1;              // index along the first dimension of a stacked tensor; -1: not stacked
  std::vector<RowSegment> rows;  // ascending in the stored rows of a head; empty: rows are in order
  bool transposed = false;       // whether its last two dimensions are swapped, after the rows were selected
  Index row_group = 1;           // as in Tensor
  Index first = 0;               // offset in the last dimension of `shape`, after the above
  // For Form::kAxes, instead of the above: the stored axes, and the part's indices along the axes that it lacks. With
  // `columns` > 1, the last dimension of `shape` has so many elements (Tensor::columns), and `first` is the stored one.
  std::span<const StoredAxis> axes = {};
  Index layer = 0, expert = 0, number = 0, columns = 1;  // number: of the rule's parts

  Index at(StoredAxis::Of of) const {
    return of == StoredAxis::Of::kLayers ? layer : of == StoredAxis::Of::kExperts ? expert : number;
  }
  bool pairs = false;  // the remainder of a split axis is in rotary pairs
};

// Returns the part as a tensor named `name` over the same bytes.
Tensor unpack(const Tensor& packed, const PackedPart& part, std::string name);

// Unpacks many parts of one tensor. Uses an index instead of searching all fragments for each part.
class PackedParts {
 public:
  // `packed` must outlive this object. `parts` are those that will be asked for.
  PackedParts(const Tensor& packed, std::span<const PackedPart> parts);
  Tensor unpack(const PackedPart& part, std::string name) const;

 private:
  const Tensor& packed_;
  std::optional<FragmentIndex> fragments_, replicas_;  // only for parts of Form::kAxes
};

// Returns the canonical names of the parts of a packed tensor. `experts` is the number of experts in a stacked tensor;
// a number larger than any model's is ignored. The number of stacked layers is that of the numbered() family.
std::vector<std::string> part_names(const ParsedName& name, Index experts);

// Returns the parts of a stored tensor of this shape, which must not be an optimizer's scalar. A tensor whose rows are
// in rotary pairs has one part. So does a section: its part has the shape of the whole tensor and covers one box of it.
// With `hf_rows` the rows are put into Hugging Face's order, otherwise they keep theirs. `config` may be null if the
// form needs no head counts. `what` names the tensor in errors, which give the expected shape.
Result<std::vector<PackedPart>> parts_of(const ParsedName& name, const Dims& shape, const ModelConfig* config,
                                         bool hf_rows, const std::string& what);

// Returns the shape of the packed tensor for parts of these shapes, in the order of part_names(). Fails with
// unsupported if they do not fit together, and with a usage error if it is a section and there is no config.
Result<Dims> packed_shape(const StoredRule& stored, std::span<const Dims> parts, const ModelConfig* config);

// A tensor that a convention stores, and the canonical tensors it consists of.
struct PackedGroup {
  std::string name;
  const StoredRule* stored = nullptr;  // null: one tensor with its own name
  std::vector<std::size_t> parts;      // indices in the catalog, in the order of part_names()
};
// Groups tensors of a canonical view into the tensors that a convention stores, in the order of their first parts.
// Optimizer state is grouped like its parameter, and a tensor without a name in the convention keeps its own. Fails if
// a part of a tensor is not among `tensors`.
Result<std::vector<PackedGroup>> pack(const Family& family, Convention convention, const Catalog& view,
                                      const std::vector<std::size_t>& tensors);

// Returns the canonical names of a key, of a tensor or an object: one for each part if it names a packed tensor.
std::vector<std::string> canonical_keys(const Family& family, const Catalog& catalog, const ModelConfig* config,
                                        std::string_view key);

}  // namespace reshard
