// SPDX-License-Identifier: Apache-2.0
// Joins the parts of a parameter that tensor-parallel ranks have. How they are cut is known from:
//
//   mp_rank_TT_model_states.pt         AutoTP: "universal_checkpoint_info" in the model states
//                                      (deepspeed/module_inject/layers.py, collect_autotp_universal_checkpoint_info)
//   layer_LL-model_TT-model_states.pt  a pipeline: the family's cuts (files of GPT-NeoX)
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "formats/encoding/pickle.h"
#include "lib/checkpoint/catalog.h"
#include "lib/layout/layout.h"

namespace reshard::deepspeed {

// How a parameter is cut.
struct PartCut {
  int dim = -1;                                 // -1: every rank has the whole
  Index sections = 1;                           // fused sections along the dimension; each is sharded separately
  std::vector<std::vector<Index>> widths = {};  // of each section on each rank; empty if they are equal
};

// AutoTP's "universal_checkpoint_info". Each of its patterns is a regular expression for one name, with escaped dots.
struct TensorParallelInfo {
  std::set<std::string> rows, replicated;
  std::map<std::string, PartCut> sections;
  std::map<std::string, std::string> unsupported;       // and why
  std::set<std::string> unknown_patterns;               // not single names: written by another trainer than AutoTP
  std::map<std::string, std::map<Index, Dims>> shapes;  // of the part of each rank, if recorded

  // Returns how a parameter is cut: along dimension 0 if it is not listed.
  PartCut cut_of(const std::string& name) const;
  // Returns the recorded shape of a rank's part of a parameter, if there is one.
  std::optional<Dims> shape_of(const std::string& name, Index rank) const;
};
// Fails with kCorrupt if a member is not what DeepSpeed writes.
Result<TensorParallelInfo> read_tensor_parallel_info(pickle::Value info);

// The whole parameter, and the boxes of each rank's part.
struct JoinedParts {
  Dims shape;                                  // of the whole
  bool is_replicated = false;                  // each part is the whole
  std::vector<std::vector<LocalBox>> of_rank;  // for each rank: boxes of the whole, and their positions in its part
};
// Joins parts of these shapes, one for each rank. Fails with kCorrupt if they cannot come from this cut of one
// parameter.
Result<JoinedParts> join_parts(const PartCut& cut, const std::vector<Dims>& shapes);

// Adds the part of `rank`, whose boxes are relative to the part, to `whole`, which the first part creates. Of a
// replicated parameter the further parts become replicas, or are dropped if `with_copies` is false.
void add_part(std::optional<Tensor>& whole, const Tensor& part, const JoinedParts& parts, Index rank, bool with_copies);

}  // namespace reshard::deepspeed
