// Whether a device does what the CPU's definitions say: for tests of every device, and for a program that runs where
// there is a GPU and no test framework (tests/cuda).
#pragma once

#include "lib/device/device.h"

namespace reshard {

// Each fails with what differed first. Random inputs, the same in every run for the same seed.
Status check_transfers(Device& device, unsigned seed);
Status check_copies(Device& device, unsigned seed);
Status check_conversions(Device& device, unsigned seed);
Status check_digests(Device& device, unsigned seed);
// Copies, conversions and digests queued one after the other on two streams, each working on what the last one made.
Status check_chains(Device& device, unsigned seed);

}  // namespace reshard
