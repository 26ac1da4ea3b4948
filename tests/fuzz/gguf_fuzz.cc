// Fuzzes the header of a GGUF file: tensors have the size of their shapes, and a config is made or not.
#include <cstddef>
#include <cstdint>

#include "formats/gguf/gguf.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::gguf_fuzz {

FUZZ_TARGET(gguf)(const std::uint8_t* data, std::size_t size) {
  const auto header = gguf::read_header(input_file(data, size));
  if (!header) return 0;
  Catalog catalog;
  for (const gguf::TensorInfo& info : header->tensors) {
    require(info.type != nullptr && info.offset >= 0);
    require(info.bytes == volume(info.shape) * byte_size(info.type->dtype));
    Tensor tensor;
    tensor.name = info.name;
    tensor.dtype = info.type->dtype;
    tensor.shape = info.shape;
    if (!catalog.add(std::move(tensor))) return 0;
  }
  const gguf::MadeConfig made = gguf::make_config(*header, catalog);
  require(made.config.has_value() == made.why_not.empty());
  return 0;
}

}  // namespace reshard::gguf_fuzz
