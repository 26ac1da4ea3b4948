// Ranks as threads of one process that have what ranks on GPUs have: a device each, and beside the transport for what
// they tell each other one that moves elements between the memories of the devices.
#pragma once

#include <functional>
#include <string>

#include "lib/device/device.h"
#include "lib/transport/transport.h"

namespace reshard {

// What ranks work on: a device whose memory is not the host's (split_device.h), or a GPU, of which there is one for all
// ranks, and NCCL.
enum class RankDevice { kSplit, kGpu };

// Why ranks cannot work on a GPU here; nothing where they can.
std::string why_no_gpu_ranks();

// Calls work(ranks, data, device) on `n` threads, as run_local_ranks() (local_ranks.h).
Status run_device_ranks(int n, RankDevice kind,
                        const std::function<Status(Transport& ranks, Transport& data, Device& device)>& work);

}  // namespace reshard
