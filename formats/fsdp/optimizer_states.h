// SPDX-License-Identifier: Apache-2.0
// Finds the parameters of numbered optimizer states.
//
// In FSDP2, and without sharding, id i is the i-th parameter of the model, and its moments have the parameter's shape
// (formats/tensor_files/parameter_ids.h). In FSDP1 the state is flat: the elements of all parameters of a wrapped
// module one after the other, padded with zeros to a multiple of the ranks, and each rank has an equal run:
//
//   id 0   embed | norm | head | 0 0      parameters outside the wrapped modules
//   id 1   q | k | v | ... of layer 0     one id for each wrapped module, in the model's order
//          rank 0  | rank 1  | rank 2
//
// With use_orig_params an id is a parameter, and a rank has those elements of it that are in the rank's run.
// (torch/distributed/fsdp/_flat_param.py)
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/tensor_files/parameter_ids.h"

namespace reshard::fsdp {

// Returns the parameters among `tensors`, which are parameters and buffers in the model's order: the subsequence with
// the shapes of the ids. Returns nothing if there is none or more than one.
std::optional<std::vector<NamedShape>> without_buffers(const std::vector<NamedShape>& tensors,
                                                       const std::vector<ParameterId>& ids);

// Parameters that were flattened together, in order, with `elements` elements in all.
struct FlatUnit {
  std::vector<const NamedShape*> parameters;
  Index elements = 0;
};

// An id, and how many elements of its flat states each shard has.
struct FlatId {
  Index id = 0;
  std::vector<Index> lengths;
};

struct FlatUnits {
  std::vector<FlatUnit> units;  // one for each id, in order; empty if unknown
  std::string evidence;         // for people: how they were found, or why they could not be
};

// Returns the unit of each id. `ids` are ascending, `parameters` in the model's order; the result refers to them. With
// as many ids as parameters each parameter is a unit; otherwise each numbered module (layers.0) is one, after a first
// unit with the parameters outside of them. Fits only if the runs of each id are as long as its unit plus padding.
FlatUnits flat_units(const std::vector<NamedShape>& parameters, const std::vector<FlatId>& ids);

}  // namespace reshard::fsdp
