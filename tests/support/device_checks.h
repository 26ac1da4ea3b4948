// Checks a device against the CPU's definitions: used by tests of every device, and by a program for machines with a
// GPU and no test framework (tests/cuda).
#pragma once

#include "lib/device/device.h"

namespace reshard {

// Each check fails with the first difference. The inputs are random, but equal in every run with the same seed.
Status check_transfers(Device& device, unsigned seed);
Status check_copies(Device& device, unsigned seed);
Status check_conversions(Device& device, unsigned seed);
Status check_digests(Device& device, unsigned seed);
// Checks copies, conversions and digests that are queued in a chain on two streams, each working on the previous
// result.
Status check_chains(Device& device, unsigned seed);

}  // namespace reshard
