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

Result<bool> recognises(const Place& place) {
  return place.has_file(file_name({}, 1, 0)) || place.has_file(file_name({}, 2, 0));
}
Result<bool> recognises_none(const Place&) { return false; }

}  // namespace
}  // namespace vllm

const Format kVllmFormat = {
    .name = "vllm",
    .title = "vLLM sharded_state",
    .recognises = vllm::recognises,
    .open = vllm::open,
    .lay_out = vllm::lay_out,
    .holds = Holds::kModel,
    .sharding = Sharding::kOwnLocal,
    .hf_names = true,
    .side_files = kModelSideFiles,
    .stage_rule = StageRule::kVllm,
    .max_file_bytes = kUsualFileBytes,
};

const Format kVllm013Format = {
    .name = "vllm-0.13",
    .title = "vLLM sharded_state until 0.13",
    .recognises = vllm::recognises_none,
    .open = nullptr,
    .lay_out = vllm::lay_out_without_scales,
    .holds = Holds::kModel,
    .sharding = Sharding::kOwnLocal,
    .hf_names = true,
    .side_files = kModelSideFiles,
    .stage_rule = StageRule::kVllm,
    .max_file_bytes = kUsualFileBytes,
};

}  // namespace reshard
