// The files of a model that an index names (formats/encoding/weight_index.h), and how far what is in them agrees with
// it.
#pragma once

#include <string>
#include <vector>

#include "formats/encoding/weight_index.h"
#include "lib/checkpoint/catalog.h"

namespace reshard {

class IndexedFiles {
 public:
  // Reads `root`/`index`. An I/O error that names the tensors where one of its files is missing.
  static Result<IndexedFiles> open(const std::string& root, const std::string& index);

  const std::vector<std::string>& files() const { return files_; }  // sorted
  bool contains(const std::string& file) const;
  std::size_t tensors() const { return index_.entries().size(); }

  // Whether a tensor found in a file is to be read: not where the index has it in another. One that the index does not
  // know is, for a loader would find it too; a piece of one may lie in any file.
  bool is_wanted(const std::string& tensor, const std::string& file, bool is_piece = false);

  // Corrupt where a tensor of the index was not found where it should be. Other differences become warnings. The index
  // becomes one of the catalog's metadata files.
  Status check(Catalog& catalog) const;

 private:
  explicit IndexedFiles(WeightIndex index) : index_(std::move(index)) {}

  WeightIndex index_;
  std::vector<std::string> files_;
  std::vector<bool> seen_;              // of each entry of the index
  std::vector<std::string> unindexed_;  // tensors that it does not have
  std::vector<std::string> copies_;     // tensors that it has in another file
};

}  // namespace reshard
