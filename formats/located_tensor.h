// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/checkpoint/catalog.h"

namespace reshard {

// Takes what locate() finds out from the same tensor of another reader.
inline void take_location(Tensor& tensor, const Tensor& located) {
  tensor.fragments = located.fragments;
  tensor.replicas = located.replicas;
  tensor.dtype = located.dtype;
  tensor.located = located.located;
}

}  // namespace reshard
