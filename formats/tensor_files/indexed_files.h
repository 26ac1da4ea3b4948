// SPDX-License-Identifier: Apache-2.0
// The files that a model's index names (formats/encoding/weight_index.h), and the check of their content against it.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "formats/encoding/weight_index.h"
#include "lib/checkpoint/catalog.h"

namespace reshard {

// Returns the index of a directory's model among its `indexes`, or an empty text: the only one that is not a variant's,
// or, unless `has_model` (in a file without an index), that of the only variant. Fails if there are several.
Result<std::string> index_of_model(const std::string& directory, const std::vector<std::string>& indexes,
                                   std::string_view ending, bool has_model);

// An index, and which of its tensors were found so far.
class IndexedFiles {
 public:
  // Reads `root`/`index`.
  static Result<IndexedFiles> open(const std::string& root, const std::string& index);

  const std::vector<std::string>& files() const { return files_; }  // sorted
  bool contains(const std::string& file) const;
  std::size_t tensors() const { return index_.entries().size(); }
  const WeightIndex& index() const { return index_; }
  // Returns the file that the index names for one of its tensors.
  const std::string& file_of(const std::string& tensor) const { return index_.entries()[*index_.find(tensor)].file; }

  // Records that a tensor was found in a file, and returns whether to read it. A tensor that the index has in another
  // file is a stale copy and is skipped. A tensor that the index does not know is read, as loaders would read it. A
  // piece of a tensor may be in any file.
  bool is_wanted(const std::string& tensor, const std::string& file, bool is_piece = false);

  // Keeps the tensors of a file that cannot be read out of absent(). Returns their names, none without an index.
  static std::vector<std::string> leave_out(std::optional<IndexedFiles>& index, const std::string& file);

  // Returns the tensors of the index that were not found in their files, sorted, by file.
  std::map<std::string, std::vector<std::string>> absent() const;
  // If all of these tensors of the index were found in other files, returns the file of the first; otherwise nothing.
  std::string other_file(const std::vector<std::string>& tensors) const;

  // Warns of what is read although it differs from the index. Adds the index to the catalog's metadata files.
  void describe(Catalog& catalog) const;

 private:
  explicit IndexedFiles(WeightIndex index) : index_(std::move(index)) {}

  std::vector<std::string> leave_out(const std::string& file);

  WeightIndex index_;
  std::vector<std::string> files_;
  std::vector<bool> seen_;                     // for each entry of the index, whether it was found
  std::vector<std::string> unindexed_;         // found, but not in the index
  std::set<std::string> left_out_;             // files
  std::map<std::string, std::string> copies_;  // found in another file than the index says, and that file
};

}  // namespace reshard
