// SPDX-License-Identifier: Apache-2.0
#include "formats/vllm/vllm.h"

#include "formats/tensor_files/target.h"
#include "lib/base/file.h"

namespace reshard {
namespace vllm {

std::string file_name(const Worker& worker, Index stages, Index part) {
  const std::string rank = std::to_string(worker.rank) + "-part-" + std::to_string(part) + ".safetensors";
  return stages == 1 ? "model-rank-" + rank : "model-pp-" + std::to_string(worker.stage) + "-tp-" + rank;
}

namespace {

Result<bool> recognises(const PathSnapshot& place) {
  return place.has_file(file_name({}, 1, 0)) || place.has_file(file_name({}, 2, 0));
}

constexpr Format kRow = {
    .name = "vllm",
    .title = "vLLM sharded_state",
    .recognises = recognises,
    .open = open,
    .lay_out = vllm::lay_out,
    .holds = StateSupport::kModel,
    .sharding = Sharding::kOwnLocal,
    .hf_names = true,
    .side_files = kModelSideFiles,
    .stage_rule = StageRule::kVllm,
    .max_file_bytes = kUsualFileBytes,
};

}  // namespace
}  // namespace vllm

constinit const Format kVllmFormat = vllm::kRow;

constinit const Format kVllm013Format =
    written_as(vllm::kRow, "vllm-0.13", "vLLM sharded_state until 0.13", vllm::lay_out_without_scales);

}  // namespace reshard
