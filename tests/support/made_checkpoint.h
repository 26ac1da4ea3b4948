// A checkpoint that a test makes: tensors of one file, and objects that lie in none.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/source/tensor_source.h"

namespace reshard {

class MadeCheckpoint : public Reader {
 public:
  // Its file is `name` in the directory `root`, which is there.
  MadeCheckpoint(const std::string& root, const std::string& name);

  // Float32; cut in two fragments at row `cut`, if that is not 0.
  void add(const std::string& name, const Dims& shape, const std::vector<float>& values, Index cut = 0);
  // Of any dtype, in one fragment.
  void add(const std::string& name, DType dtype, const Dims& shape, std::string_view elements);
  // An object, of no bytes in any file. `value` is what blob_bytes() and describe() give.
  void add_object(const std::string& name, const std::string& value);
  void write();  // the file, with what was added before
  // All elements of a tensor as the catalog has it now, whose fragments cover it exactly once.
  std::vector<float> read(const std::string& tensor);

  Status locate(const std::vector<std::size_t>&, int, const std::string&) override { return {}; }
  Result<std::string> blob_bytes(const Blob& blob) override { return objects_.at(blob.name); }
  std::string describe(const Blob& blob) override { return objects_.at(blob.name); }

 private:
  std::string bytes_;
  std::map<std::string, std::string> objects_;
};

// All elements of a tensor, row-major: as float32, and as they are.
std::vector<float> floats_of(TensorSource& source, const std::string& tensor);
std::string bytes_of(TensorSource& source, const std::string& tensor);
// The same of a catalog, whose fragments have to cover the tensor exactly once.
std::vector<float> floats_of(const Catalog& catalog, FilePool& files, const std::string& tensor);

// "from", "from" + 1, ...: `n` of them.
std::vector<float> counted(Index n, float from = 0);

}  // namespace reshard
