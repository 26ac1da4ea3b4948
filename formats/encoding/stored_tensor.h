// Where the elements of one stored tensor lie in its file: what every reader of files of tensors finds out.
#pragma once

#include <cstdint>
#include <optional>

#include "lib/base/result.h"
#include "lib/layout/box.h"
#include "lib/layout/dtype.h"

namespace reshard {

// Element x is at
//   payload_offset + start_bytes + byte_size(dtype) * sum(x[d] * strides[d]),
// inside the payload for every x.
struct StoredTensor {
  DType dtype = DType::kFloat32;
  Dims shape;
  Dims strides;                      // elements, not negative
  Index start_bytes = 0;             // from the payload's first byte
  Index payload_offset = 0;          // in the file
  Index payload_length = 0;          // bytes; may be more than the tensor needs
  std::optional<std::uint32_t> crc;  // CRC-32 of the payload, where recorded
  bool big_endian = false;
};

}  // namespace reshard
