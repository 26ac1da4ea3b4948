// check_cover() for tensors one after the other: the layers of a model have the same boxes, and those found to cover
// once are not looked at again.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "lib/checkpoint/catalog.h"

namespace reshard {

class CoverChecker {
 public:
  Status check(const Tensor& tensor);  // which must outlive it

 private:
  std::unordered_map<std::uint64_t, const Tensor*> good_;
};

}  // namespace reshard
