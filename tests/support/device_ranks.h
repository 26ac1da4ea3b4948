// Ranks as threads of one process, each with a device, a control transport, and a data transport that moves elements
// between the devices' memories, like ranks on GPUs.
#pragma once

#include <functional>
#include <string>

#include "lib/device/device.h"
#include "lib/transport/transport.h"

namespace reshard {

// The device of the ranks: one whose memory is not the host's (split_device.h), or a GPU shared by all ranks, with
// NCCL.
enum class RankDevice { kSplit, kGpu };

// Returns why ranks cannot use a GPU here; empty if they can.
std::string why_no_gpu_ranks();

// Calls work(ranks, data, device) on `n` threads, like run_local_ranks() (local_ranks.h).
Status run_device_ranks(int n, RankDevice kind,
                        const std::function<Status(Transport& ranks, Transport& data, Device& device)>& work);

}  // namespace reshard
