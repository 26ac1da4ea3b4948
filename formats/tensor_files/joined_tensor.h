// SPDX-License-Identifier: Apache-2.0
// A whole tensor, joined from the parts of it that the files of several ranks hold.
#pragma once

#include <optional>
#include <string>

#include "lib/base/number_table.h"
#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/format.h"
#include "lib/layout/layout.h"

namespace reshard {

// A tensor to which parts are added one by one. The first part with a given box becomes a fragment, further parts with
// the same box become replicas. Nothing checks that the fragments cover the tensor: validate() does.
struct JoinedTensor {
  JoinedTensor(std::string name, DType dtype, const Dims& shape, KeyPath path = {});
  explicit JoinedTensor(const TargetTensor& wanted)
      : JoinedTensor(wanted.name, wanted.dtype, wanted.shape, wanted.path) {}

  // Adds the box `place.box` of the whole, which starts at `place.at` in a local tensor of shape `local_shape` that is
  // stored in row-major order at `extent`.
  void add(const Dims& local_shape, const LocalBox& place, const Extent& extent);
  // Adds the same box of a local tensor with the strides and the extent of `local`.
  void add(const Fragment& local, const LocalBox& place);
  // Adds a fragment that is already in the coordinates of the whole.
  void add(const Fragment& fragment);

  // Fails with kCorrupt if a part says that the whole has another dtype or shape than the parts before it said.
  Status check_same_whole(DType whole_dtype, const Dims& whole_shape) const;

  Tensor tensor;

 private:
  bool is_new(const Box& box);

  NumberTable by_box_;  // of the fragments
};

// Fails with kCorrupt if a tensor of this shape has 2^63 bytes or more. Readers that compute a whole shape from parts
// must check it before they add the tensor to a catalog.
Status check_size(DType dtype, const Dims& shape);

// Returns the intersection of a stored piece of a rank's local tensor with `part`, as a fragment of the whole, or
// nothing if they do not overlap.
std::optional<Fragment> in_whole(const Fragment& local, const LocalBox& part, Index element_bytes);

}  // namespace reshard
