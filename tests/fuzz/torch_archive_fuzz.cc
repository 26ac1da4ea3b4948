// Fuzzes items: a tensor that is found has all its elements inside the file.
#include <cstddef>
#include <cstdint>

#include "formats/encoding/torch_archive.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::torch_archive_fuzz {

FUZZ_TARGET(torch_archive)(const std::uint8_t* data, std::size_t size) {
  const File& file = input_file(data, size);
  const auto length = static_cast<Index>(size);
  if (const auto object = torch_archive::read_object_item(file, 0, length)) (void)pickle::print(object->root());
  const auto tensor = torch_archive::read_tensor_item(file, 0, length);
  if (!tensor) return 0;
  require(fits_inside(tensor->extent.offset, tensor->extent.length, length));
  require(tensor->strides.rank() == tensor->shape().rank());
  Index last = 0;
  for (int d = 0; d < tensor->shape().rank(); ++d) {
    if (tensor->shape()[d] == 0) return 0;
    last += (tensor->shape()[d] - 1) * tensor->strides[d];
  }
  const Index width = byte_size(tensor->dtype);
  require(fits_inside(tensor->start + last * width, width, tensor->extent.length));
  return 0;
}

}  // namespace reshard::torch_archive_fuzz
