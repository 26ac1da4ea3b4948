// SPDX-License-Identifier: Apache-2.0
// The flat buffers of torch_dist's dp_reshardable optimizer:
//
//   optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg [n]
//
// A buffer has the parameters of its rank from the last to the first, each at a multiple of 64 elements. The order in
// which the model defines them is not recorded. It is found by trying the possible orders: one fits if the file's
// chunks begin where it says. Written by: megatron/core/optimizer/distrib_optimizer.py.
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
struct BufferedParameter {
  std::string name;
  Cut cut;
  Dims local;
  Index rank = 0, ranks = 1;
  Index bucket = 0, at = 0;
  friend bool operator==(const BufferedParameter& a, const BufferedParameter& b) {
    return a.name == b.name && a.bucket == b.bucket && a.at == b.at;
  }
};

// The model whose parameters are in the buffers.
struct Model {
  const Arguments& args;
  const Degrees& degrees;
  bool is_tied = false;
  const std::map<std::string, Dims>& shapes;  // of the parameters, by Megatron's names
};

// The buffers among the stored tensors, by index.
struct Buffers {
  std::map<std::size_t, std::string> words;                      // the state in it: "exp_avg"
  std::map<std::size_t, std::vector<BufferedParameter>> placed;  // its parameters; empty if `why_not` is set
  std::string why_not;
};
// Finds the buffers and their parameters. Sets `why_not` unless exactly one order of the parameters fits.
Buffers find_buffers(const Model& model, const Catalog& stored);

// Passes the stored pieces of a buffer to `sink` as fragments of its parameters; `shape` is that of the whole
// parameter.
Status emit_buffer(
    const Tensor& tensor, const std::vector<BufferedParameter>& placed,
    const std::function<Status(const BufferedParameter& parameter, const Dims& shape, const Fragment& f)>& sink);

}  // namespace reshard::megatron
