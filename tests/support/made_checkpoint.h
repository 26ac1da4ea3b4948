// A checkpoint that a test builds: tensors in one file, and objects without a file.
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
  // The file is `name` in the existing directory `root`.
  MadeCheckpoint(const std::string& root, const std::string& name);

  // Adds a float32 tensor, in two fragments cut at row `cut` unless that is 0.
  void add(const std::string& name, const Dims& shape, const std::vector<float>& values, Index cut = 0);
  // Adds a tensor of any dtype in one fragment.
  void add(const std::string& name, DType dtype, const Dims& shape, std::string_view elements);
  // Adds an object. `value` is the result of blob_bytes() and describe(); it is not stored in the file.
  void add_object(const std::string& name, const std::string& value);
  void write();  // writes the file with everything that was added
  // Returns all elements of a tensor as the catalog describes it now. Its fragments must cover it exactly once.
  std::vector<float> read(const std::string& tensor);

  Status locate(const std::vector<std::size_t>&, int, const std::string&) override { return {}; }
  Result<std::string> blob_bytes(const Blob& blob) override { return objects_.at(blob.name); }
  std::string describe(const Blob& blob) override { return objects_.at(blob.name); }

 private:
  std::string bytes_;
  std::map<std::string, std::string> objects_;
};

// Return all elements of a tensor, row-major: as float32, and as stored.
std::vector<float> floats_of(TensorSource& source, const std::string& tensor);
std::string bytes_of(TensorSource& source, const std::string& tensor);
// Like these, for a catalog whose fragments cover the tensor exactly once.
std::vector<float> floats_of(const Catalog& catalog, FilePool& files, const std::string& tensor);

// Returns `n` consecutive numbers, beginning with `from`.
std::vector<float> counted(Index n, float from = 0);

}  // namespace reshard
