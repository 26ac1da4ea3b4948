// Files of tensors from anywhere, of either kind: names are unique, and tensors lie inside the file.
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_set>

#include "formats/encoding/tensor_file.h"
#include "tests/fuzz/input_file.h"

using namespace reshard;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto file = TensorFile::open(input_file(data, size));
  if (!file) return 0;
  std::unordered_set<std::string> names;
  for (const TensorFile::Entry& e : file->tensors()) {
    require(names.insert(e.name).second);
    require(fits_inside(e.tensor.extent.offset, e.tensor.extent.length, static_cast<Index>(size)));
    require(e.path.size() <= static_cast<std::size_t>(TensorFile::kMaxDepth));
  }
  for (const TensorFile::Object& o : file->objects()) {
    require(names.insert(o.name).second);
    (void)pickle::print(o.value);
  }
  return 0;
}
