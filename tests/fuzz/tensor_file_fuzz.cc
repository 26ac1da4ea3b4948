// Fuzzes tensor files of both kinds: names are unique, and tensors and ranks' parts are inside the file.
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_set>

#include "formats/encoding/tensor_file.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::tensor_file_fuzz {
namespace {

// Also checks a rank's part, which must be inside the whole tensor.
void check(const TensorFile::Entry& e, std::size_t size) {
  const auto inside = [&](const StoredTensor& t) {
    require(fits_inside(t.extent.offset, t.extent.length, static_cast<Index>(size)));
  };
  if (!e.distributed) return inside(e.tensor);
  for (const StoredTensor& part : e.distributed->parts) {
    inside(part);
    require(part.box == whole(e.distributed->shape) || !part.box.empty());
    require(contains(whole(e.distributed->shape), part.box));
    require(part.strides.rank() == part.box.rank());
  }
}

}  // namespace

FUZZ_TARGET(tensor_file)(const std::uint8_t* data, std::size_t size) {
  (void)TensorFile::open(input_file(data, size));
  const auto file = TensorFile::open(input_file(data, size), SafetensorsEnd::kExact, TensorFile::Parts::kRead);
  if (!file) return 0;
  std::unordered_set<std::string> names;
  for (const TensorFile::Entry& e : file->tensors()) {
    require(names.insert(e.name).second);
    check(e, size);
    require(e.path.size() <= static_cast<std::size_t>(TensorFile::kMaxDepth));
  }
  for (const TensorFile::Object& o : file->objects()) {
    require(names.insert(o.name).second);
    (void)pickle::print(o.value);
  }
  return 0;
}

}  // namespace reshard::tensor_file_fuzz
