// SPDX-License-Identifier: Apache-2.0
// Checkpoints of nanotron (src/nanotron/serialize): a file for each parameter and rank.
//
//   latest.txt                          "10"
//   10/checkpoint_metadata.json         {"version": "1.4", "tp": 2, "dp": 1, "metas": {...}}
//   10/model_config.json                the LlamaConfig of nanotron
//   10/model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors
//   10/model/model/decoder/0/pp_block/input_layernorm/model_weight.safetensors
//   10/optimizer/, lr_scheduler/, random/     not read
//
// The path gives the parameter's name, "model.decoder.0.pp_block.attn.qkv_proj.weight". The only tensor of a file is
// called "data". The __metadata__ of a sharded parameter give the shape of the whole and pairs of local and global
// slices, one for each fused matrix:
//
//   unsharded_shape              (128, 64)
//   local_global_slices_pairs    0,32,None|None,None,None#0,32,None|None,None,None;32,48,None|...#64,80,None|...
#pragma once

#include "lib/base/json.h"
#include "lib/checkpoint/format.h"
#include "lib/layout/layout.h"

namespace reshard {

extern const Format kNanotronFormat;

namespace nanotron {

inline constexpr std::string_view kMetadataFile = "checkpoint_metadata.json";
inline constexpr std::string_view kConfigFile = "model_config.json";
inline constexpr std::string_view kLatestFile = "latest.txt";

// Returns the directory of a step: `place` itself, or the one that its latest.txt names. Returns null if it is neither.
Result<const PathSnapshot*> step_directory(const PathSnapshot& place);

// A parsed file name.
struct FileName {
  std::string parameter;        // "weight"
  Index stage = 0, stages = 1;  // of the pipeline
  Index rank = 0, ranks = 0;    // of tensor parallelism; 0 ranks if the parameter is whole
  Index experts = 1;            // of expert parallelism
};
std::optional<FileName> parse_file_name(std::string_view name);

// Parses pairs of slices: boxes of the whole, and their positions in a local tensor.
Result<std::vector<LocalBox>> parse_slices(std::string_view text, const Dims& local, const Dims& shape);
Result<Dims> parse_shape(std::string_view text);  // "(128, 64)", "(np.int64(128), 64)"

// Opens a step. If the model has rope_interleaved, or is older than that option, the rows of q and k are in rotary
// pairs; they are read in halves, as newer models have them. A config.json is made from model_config.json.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

}  // namespace nanotron
}  // namespace reshard
