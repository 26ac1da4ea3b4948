// SPDX-License-Identifier: Apache-2.0
// Checks the shapes of a model's tensors against each other if no config.json says what they should be.
#pragma once

#include <vector>

#include "lib/model/family.h"

namespace reshard {

// Checks that the shapes of model tensors belong to one model of the family: hidden_size is the same number wherever it
// occurs, and a formula such as 3*hidden_size matches. A corrupt error names two tensors that contradict each other.
// Tensors that are not the family's, or are stored in other forms, are ignored.
Status check_shapes_agree(const Family& family, const std::vector<const Tensor*>& tensors);
Status check_shapes_agree(const Family& family, const Catalog& catalog);  // all of its tensors

// Describes a one-dimensional tensor where a parameter of two or more dimensions is expected: "a flattened parameter,
// as FSDP has it: 1/2 of its 3,072 elements". Empty if it is not that.
std::string explain_flat(const Dims& got, const Dims& expected);

}  // namespace reshard
