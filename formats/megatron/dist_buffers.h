// The flat buffers of torch_dist's dp_reshardable optimizer:
//
//   optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg [n]
//
// A buffer has the parameters of its rank from the last to the first, each on a multiple of 64 elements. In which order
// a model defines them is not written down; the places where the file's chunks begin decide.
// Written by: megatron/core/optimizer/distrib_optimizer.py.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "formats/megatron/arguments.h"
#include "formats/megatron/names.h"
#include "lib/checkpoint/catalog.h"

namespace reshard::megatron {

// A parameter in a flat buffer.
struct Placed {
  std::string name;
  Cut cut;
  Dims local;
  Index rank = 0, ranks = 1;
  Index bucket = 0, at = 0;
  friend bool operator==(const Placed& a, const Placed& b) {
    return a.name == b.name && a.bucket == b.bucket && a.at == b.at;
  }
};

// What decides where parameters lie.
struct Model {
  const Arguments& args;
  const Degrees& degrees;
  bool is_tied = false;
  const std::map<std::string, Dims>& shapes;  // of the model's parameters, by Megatron's names
};

struct Buffers {
  std::map<std::size_t, std::string> words;           // "exp_avg", of each stored tensor that is a buffer
  std::map<std::size_t, std::vector<Placed>> placed;  // its parameters; empty where `why_not` is said
  std::string why_not;
};
// Those among the stored tensors, where one order of parameters alone fits.
Buffers find_buffers(const Model& model, const Catalog& stored);

// The pieces of a buffer, as parts of the parameters that lie in them; `shape`: of the whole parameter.
Status emit_buffer(const Tensor& tensor, const std::vector<Placed>& placed,
                   const std::function<Status(const Placed& parameter, const Dims& shape, const Fragment& f)>& sink);

}  // namespace reshard::megatron
