// Whether ranks with a device each exchange the shards of a tensor as the CPU would cut it: for tests of transports,
// and for a program that runs where there is a GPU and no test framework (tests/cuda).
#pragma once

#include "lib/device/device.h"
#include "lib/transport/transport.h"

namespace reshard {

// What every rank of `ranks` calls: a matrix of random numbers lies in row shards; each rank packs the columns that
// another is to have, exchanges them, and unpacks what it gets into a column shard, which it compares. Memory is the
// device's. Several transfers are under way at once.
Status check_exchange(Device& device, Transport& ranks, unsigned seed);

}  // namespace reshard
