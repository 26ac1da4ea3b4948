// SPDX-License-Identifier: Apache-2.0
#include "formats/deepspeed/deepspeed.h"

#include "formats/deepspeed/file_set.h"
#include "formats/deepspeed/reader.h"

namespace reshard {

const Format kDeepspeedFormat = {
    .name = "deepspeed",
    .title = "DeepSpeed",
    .recognises = deepspeed::is_checkpoint,
    .open = open_as<deepspeed::DeepspeedReader>,
    .lay_out = nullptr,
    .has_masters = true,
};

const Format kDeepspeedUniversalFormat = {
    .name = "deepspeed-universal",
    .title = "DeepSpeed's universal checkpoint",
    .recognises = nullptr,
    .open = nullptr,
    .lay_out = deepspeed::lay_out_universal,
    .holds = StateSupport::kAdam,
    .takes_object = deepspeed::takes_object,
    .hf_names = true,
};

}  // namespace reshard
