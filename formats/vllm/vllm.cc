#include "formats/vllm/vllm.h"

#include "formats/tensor_files/target.h"

namespace reshard {

const Format kVllmFormat = {
    .name = "vllm",
    .title = "vLLM sharded_state",
    .recognises = [](const std::string&) { return false; },
    .open = nullptr,
    .lay_out = vllm::lay_out,
    .holds = Holds::kModel,
    .sharding = Sharding::kOwnLocal,
    .hf_names = true,
    .side_files = kModelSideFiles,
};

}  // namespace reshard
