// Where torch's classes of a `.metadata` pickle live: torch/distributed/checkpoint/metadata.py and filesystem.py.
#pragma once

#include <string_view>

namespace reshard::dcp {

inline constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";
inline constexpr std::string_view kFilesystemModule = "torch.distributed.checkpoint.filesystem";

}  // namespace reshard::dcp
