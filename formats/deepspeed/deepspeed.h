// DeepSpeed's checkpoints (deepspeed/runtime/engine.py, save_checkpoint): torch.save of what each rank has, a directory
// for each step.
//
//   latest                                                     "global_step1", the tag
//   global_step1/mp_rank_00_model_states.pt                    ZeRO 0, 1, 2: "module", the model as it computes
//                zero_pp_rank_D_mp_rank_00_model_states.pt     ZeRO 3, of each rank: placeholders of size [0] there
//                [bf16_]zero_pp_rank_D_mp_rank_00_optim_states.pt   rank D's part of masters and moments
//                layer_LL-model_states.pt                      PipelineModule: one layer's weights; mp_rank is the
//                stage layer_M_expert_E_mp_rank_00_model_states.pt   MoE: an expert, by its number in the whole model
//                zero/NAME/{fp32, exp_avg, exp_avg_sq, step}.pt     a universal checkpoint (ds_to_universal.py)
//
// Masters and moments are vectors: the parameters of a group one after the other, in the order of "param_shapes".
//
//   ZeRO 1, 2, BF16_Optimizer           embed | q | k | v ... 0 0     one vector, cut into equal runs;
//                                       rank 0    | rank 1            zeros up to a multiple of 2 x ranks
//   ZeRO 3, each sub-group of its own   rank 0:  embed[0:n/2)  q[0:n/2) ...
//                                       rank 1:  embed[n/2:n)  q[n/2:n) ...   each parameter cut into equal runs
//
// A run of a tensor's elements is a few boxes (formats/tensor_files/flat_runs.h). Described in
// docs/formats/deepspeed.md.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kDeepspeedFormat;
extern const Format kDeepspeedUniversalFormat;  // written alone: what kDeepspeedFormat reads too

namespace deepspeed {

inline constexpr std::string_view kLatestFile = "latest";
inline constexpr std::string_view kLatestUniversalFile = "latest_universal";
inline constexpr std::string_view kUniversalDirectory = "zero";

// A file name taken apart.
struct FileName {
  enum class Kind { kModel, kOptimizer, kLayer, kExpert } kind = Kind::kModel;
  Index part = 0;             // the XX of mp_rank_XX: of tensor parallelism, or a pipeline's stage
  std::optional<Index> rank;  // among the data-parallel ones; nothing: the file is of all of them
  Index layer = 0;            // of a pipeline, or counted among the layers that have experts
  Index expert = 0;
};
std::optional<FileName> parse_file_name(std::string_view name);

// The files of one checkpoint, relative to `root`.
struct FileSet {
  std::string root;       // as it was named
  std::string directory;  // "global_step1/", the tag's; empty: the root itself
  std::string latest;     // the file that names the tag, where one did
  bool is_universal = false;
  std::map<std::pair<Index, Index>, std::string> models;      // by part and rank; rank -1: of all
  std::map<std::pair<Index, Index>, std::string> optimizers;  // by part and rank
  std::map<Index, std::string> layers;
  std::map<std::pair<Index, Index>, std::string> experts;  // by layer and expert
  std::vector<std::string> unread;  // optimizer states of another kind: an expert's without ZeRO, "expp_rank_..."

  bool has_rank_models() const { return !models.empty() && models.begin()->first.second >= 0; }  // as ZeRO 3 has them
};

// What `path` is: the directory with the file `latest`, or that of a tag. An I/O error where the tag is not there or
// holds no model states; unsupported where a layer is in files of tensor-parallel ranks and the checkpoint is not
// universal.
Result<FileSet> find_files(const std::string& path);

Result<std::unique_ptr<Reader>> open(const std::string& path, const OpenOptions& options);

// A universal checkpoint: of AdamW's state, or of weights alone.
Result<std::unique_ptr<Target>> lay_out_universal(LayoutRequest request);
bool takes_object(std::string_view key);  // Format::takes_object

}  // namespace deepspeed
}  // namespace reshard
