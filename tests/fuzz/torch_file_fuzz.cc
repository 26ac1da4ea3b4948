// Fuzzes torch.save files: every tensor has all its elements inside the file, and rewritten values read back as equal.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_file.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::torch_file_fuzz {
namespace {

void check(const StoredTensor& tensor, Index length) {
  require(fits_inside(tensor.extent.offset, tensor.extent.length, length));
  require(tensor.strides.rank() == tensor.shape().rank());
  Index last = 0;
  for (int d = 0; d < tensor.shape().rank(); ++d) {
    if (tensor.shape()[d] == 0) return;
    last += (tensor.shape()[d] - 1) * tensor.strides[d];
  }
  const Index width = byte_size(tensor.dtype);
  require(fits_inside(tensor.start + last * width, width, tensor.extent.length));
}

}  // namespace

FUZZ_TARGET(torch_file)(const std::uint8_t* data, std::size_t size) {
  const File& file = input_file(data, size);
  const auto length = static_cast<Index>(size);
  const auto torch = TorchFile::open(file, 0, length);
  if (!torch) return 0;
  std::vector<pickle::Value> values = {torch->root()};
  for (std::size_t i = 0; i < torch->root().size(); ++i)
    values.push_back(torch->root().kind() == pickle::Kind::kDict ? torch->root().value(i) : torch->root()[i]);
  for (const pickle::Value& value : values) {
    if (const auto tensor = torch->resolve(value)) check(*tensor, length);
    pickle::PickleWriter w;
    if (!pickle::write_value(w, value, 1 << 20)) continue;
    const auto again = pickle::parse(std::move(w).finish(), "again");
    require(again.has_value());
  }
  return 0;
}

}  // namespace reshard::torch_file_fuzz
