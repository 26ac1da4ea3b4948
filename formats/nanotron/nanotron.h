// nanotron's checkpoints (src/nanotron/serialize): a file for each parameter and rank.
//
//   latest.txt                          "10"
//   10/checkpoint_metadata.json         {"version": "1.4", "tp": 2, "dp": 1, "metas": {...}}
//   10/model_config.json                the LlamaConfig of nanotron
//   10/model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors
//   10/model/model/decoder/0/pp_block/input_layernorm/model_weight.safetensors
//   10/optimizer/, lr_scheduler/, random/     not read
//
// The path is the parameter's name, "model.decoder.0.pp_block.attn.qkv_proj.weight"; the one tensor of a file is
// "data". A parameter that is cut has in __metadata__ the shape of the whole and which slices of the local tensor are
// which of it, one pair for each fused matrix:
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

// The step's directory that a place is, or that its latest.txt names; null where it is neither.
Result<const PathSnapshot*> step_directory(const PathSnapshot& place);

// A file name taken apart.
struct FileName {
  std::string parameter;        // "weight"
  Index stage = 0, stages = 1;  // of the pipeline
  Index rank = 0, ranks = 0;    // of tensor parallelism; no ranks: the parameter is whole
  Index experts = 1;            // of expert parallelism
};
std::optional<FileName> parse_file_name(std::string_view name);

// Which box of a tensor lies where in a local one of this shape.
Result<std::vector<LocalBox>> parse_slices(std::string_view text, const Dims& local, const Dims& shape);
Result<Dims> parse_shape(std::string_view text);  // "(128, 64)"

// The names are the directories'. q and k of models from before rope_interleaved, or with it, have their rows in rotary
// pairs; they are shown half by half, as nanotron has them since. A config.json is made of model_config.json.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

}  // namespace nanotron
}  // namespace reshard
