// What the shapes of a model's tensors say about each other, where no config.json says what they are.
#pragma once

#include <vector>

#include "lib/model/family.h"

namespace reshard {

// That the shapes of model tensors are those of one model of the family: hidden_size is the same number in all that
// have it, and where a formula says 3*hidden_size that is there. Corrupt where two contradict each other; the error
// names both. Tensors that are not the family's, or stored in other forms, say nothing.
Status check_shapes_agree(const Family& family, const std::vector<const Tensor*>& tensors);
Status check_shapes_agree(const Family& family, const Catalog& catalog);  // all of its tensors

// What a tensor of one dimension is to a parameter of two or more: "a flattened parameter, as FSDP has it: 1/2 of its
// 3,072 elements". Empty where that is not what it is.
std::string explain_flat(const Dims& got, const Dims& expected);

}  // namespace reshard
