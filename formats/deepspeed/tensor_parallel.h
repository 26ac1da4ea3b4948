// How the parts that tensor-parallel ranks have of a parameter join.
//
//   mp_rank_TT_model_states.pt         AutoTP: the model states say it, in "universal_checkpoint_info"
//                                      (deepspeed/module_inject/layers.py, collect_autotp_universal_checkpoint_info)
//   layer_LL-model_TT-model_states.pt  a pipeline's: as the family cuts its parameters (GPT-NeoX's files)
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
  int dim = -1;                                 // -1: every rank has all of it
  Index sections = 1;                           // equal ones of a rank's part, each of which is cut by itself
  std::vector<std::vector<Index>> widths = {};  // of each section along the dimension, on each rank; empty: equal ones
};

// "universal_checkpoint_info" of AutoTP. Its patterns stand for one parameter each: a name behind backslashes.
struct TensorParallelInfo {
  std::set<std::string> rows, replicated;
  std::map<std::string, PartCut> sections;
  std::map<std::string, std::string> unsupported;  // and why
  std::set<std::string> unknown_patterns;          // that are no names: of another trainer than AutoTP

  // Unlisted ones are cut along dimension 0.
  PartCut cut_of(const std::string& name) const;
};
// Corrupt where a member is not what DeepSpeed writes.
Result<TensorParallelInfo> read_tensor_parallel_info(pickle::Value info);

// Where the ranks' parts of a parameter lie.
struct JoinedParts {
  Dims shape;                                  // of the whole
  bool is_replicated = false;                  // each part is the whole
  std::vector<std::vector<LocalBox>> of_rank;  // the boxes of the whole, and where they are in the rank's part
};
// `shapes`: of each rank's part. Corrupt where they cannot be parts of one parameter that is cut so.
Result<JoinedParts> join_parts(const PartCut& cut, const std::vector<Dims>& shapes);

// Adds the part of `rank`, a tensor whose boxes are in the part, to `whole`; the first part makes it. Of what every
// rank has, others than the first are copies, or with `with_copies` false left out.
void add_part(std::optional<Tensor>& whole, const Tensor& part, const JoinedParts& parts, Index rank, bool with_copies);

}  // namespace reshard::deepspeed
