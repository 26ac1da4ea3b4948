// Which parameters the states of an optimizer belong to, where its state_dict() numbers them.
//
// FSDP2, and everything that is not sharded: id i is the i-th parameter of the model, and its moments have the
// parameter's shape (formats/tensor_files/parameter_ids.h). FSDP1: its state is flat, the elements of all parameters of
// a wrapped module one after the other, zeros up to a multiple of the ranks behind them, and each rank has an equal
// run:
//
//   id 0   embed | norm | head | 0 0      what is in no wrapped module
//   id 1   q | k | v | ... of layer 0     a wrapped module each, in the model's order
//          rank 0  | rank 1  | rank 2
//
// With use_orig_params an id is a parameter again, and a rank has the run of its elements that falls to the rank.
// (torch/distributed/fsdp/_flat_param.py)
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/tensor_files/parameter_ids.h"

namespace reshard::fsdp {

// Of tensors that are parameters and buffers, in the model's order, the parameters: those whose shapes are the ids',
// one after the other. Nothing where that is not so, or so in several ways.
std::optional<std::vector<NamedShape>> without_buffers(const std::vector<NamedShape>& tensors,
                                                       const std::vector<ParameterId>& ids);

// The parameters that are flattened together, in order; their elements end at `elements`.
struct FlatUnit {
  std::vector<const NamedShape*> parameters;
  Index elements = 0;
};

// Of one id: how many elements of its flat states each shard has.
struct FlatId {
  Index id = 0;
  std::vector<Index> lengths;
};

struct FlatUnits {
  std::vector<FlatUnit> units;  // of each id, in order; empty: not known
  std::string evidence;         // a phrase for people: how they are known, or why not
};

// The units behind ascending ids, which refer to `parameters`, in the model's order: one for each parameter where there
// are as many ids, else one for each numbered module (layers.0) and one in front for what is in none. They count where
// every id's runs together are as long as its unit, but for the padding that makes them equal.
FlatUnits flat_units(const std::vector<NamedShape>& parameters, const std::vector<FlatId>& ids);

}  // namespace reshard::fsdp
