// SPDX-License-Identifier: Apache-2.0
// DeepSpeed's checkpoints (deepspeed/runtime/engine.py, save_checkpoint): a directory for each step, with torch.save
// files of each rank.
//
//   latest                                                     "global_step1", the tag
//   global_step1/mp_rank_00_model_states.pt                    ZeRO 0, 1, 2: "module", the model as it computes
//                zero_pp_rank_D_mp_rank_00_model_states.pt     ZeRO 3, each rank: placeholders of shape [0]
//                [bf16_]zero_pp_rank_D_mp_rank_00_optim_states.pt   rank D's part of masters and moments
//                layer_LL-model_states.pt                      PipelineModule: a layer; mp_rank is the stage
//                layer_M_expert_E_mp_rank_00_model_states.pt   MoE: an expert, by its number in the whole model
//                zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt   a universal checkpoint (ds_to_universal.py)
//
// Masters and moments are vectors with the parameters of a group one after the other, in the order of "param_shapes".
//
//   ZeRO 1, 2, BF16_Optimizer           embed | q | k | v ... 0 0     one vector, cut into equal runs;
//                                       rank 0    | rank 1            padded with zeros to a multiple of 2 x ranks
//   ZeRO 3, for each sub-group          rank 0:  embed[0:n/2)  q[0:n/2) ...
//                                       rank 1:  embed[n/2:n)  q[n/2:n) ...   each parameter cut into equal runs
//
// A run of a tensor's elements is a few boxes (formats/tensor_files/flat_runs.h). See docs/formats/deepspeed.md.
#pragma once

#include <string>
#include <string_view>

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kDeepspeedFormat;
extern const Format kDeepspeedUniversalFormat;  // for writing only; kDeepspeedFormat reads it

namespace deepspeed {

// Lays out a universal checkpoint of weights, or of weights with AdamW's state.
Result<std::unique_ptr<Target>> lay_out_universal(LayoutRequest request);
bool takes_object(std::string_view key);  // Format::takes_object

}  // namespace deepspeed
}  // namespace reshard
