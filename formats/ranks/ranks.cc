#include "formats/ranks/ranks.h"

#include "formats/ranks/read.h"
#include "formats/ranks/write.h"

namespace reshard {

const Format kRanksFormat = {
    .name = "ranks",
    .title = "files of ranks",
    .recognises = recognises_ranks,
    .open = open_ranks,
    .lay_out = lay_out_ranks,
    .model_only = true,
    .hf_names = true,
    .takes_mesh = true,
    .local_files = true,
};

}  // namespace reshard
