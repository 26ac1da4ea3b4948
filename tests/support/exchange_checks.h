// Checks that ranks with a device each exchange shards of a tensor correctly: used by tests of transports, and by a
// program for machines with a GPU and no test framework (tests/cuda).
#pragma once

#include "lib/device/device.h"
#include "lib/transport/transport.h"

namespace reshard {

// Called on every rank. Reshards a random matrix from row shards to column shards: each rank packs the columns that
// other ranks need, exchanges them, unpacks what it receives into its column shard and compares that. All buffers are
// device memory, and several transfers are in flight at once.
Status check_exchange(Device& device, Transport& ranks, unsigned seed);

}  // namespace reshard
