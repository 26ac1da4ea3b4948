// SPDX-License-Identifier: Apache-2.0
// Runs check_cover() on tensors one after another. Layers of a model have equal boxes, so a cover that was already
// found good is not checked again.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "lib/checkpoint/catalog.h"

namespace reshard {

class CoverChecker {
 public:
  Status check(const Tensor& tensor);  // `tensor` must outlive this object

 private:
  std::unordered_map<std::uint64_t, const Tensor*> good_;
};

}  // namespace reshard
