#include "formats/vllm/vllm.h"

#include "formats/tensor_files/target.h"
#include "lib/base/file.h"

namespace reshard {
namespace vllm {

std::string file_name(Index worker, Index part) {
  return "model-rank-" + std::to_string(worker) + "-part-" + std::to_string(part) + ".safetensors";
}

namespace {

Result<bool> recognises(const Place& place) { return place.has_file(file_name(0, 0)); }
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
};

const Format kVllm032Format = {
    .name = "vllm-0.32",
    .title = "vLLM sharded_state until 0.32",
    .recognises = vllm::recognises_none,
    .open = nullptr,
    .lay_out = vllm::lay_out_without_scales,
    .holds = Holds::kModel,
    .sharding = Sharding::kOwnLocal,
    .hf_names = true,
    .side_files = kModelSideFiles,
};

}  // namespace reshard
