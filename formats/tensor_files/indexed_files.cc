// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/indexed_files.h"

#include <algorithm>
#include <iterator>

#include "lib/base/file.h"
#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard {

Result<std::string> index_of_model(const std::string& directory, const std::vector<std::string>& indexes,
                                   std::string_view ending, bool has_model) {
  std::vector<std::string> of_model;
  std::copy_if(indexes.begin(), indexes.end(), std::back_inserter(of_model), [&](const std::string& name) {
    const auto parsed = parse_weight_index_name(name, ending);
    return parsed && parsed->variant.empty();
  });
  if (of_model.empty() && !has_model) of_model = indexes;
  if (of_model.size() > 1)
    return unsupported(directory + ": expected one index, got " + names_text(of_model, "file") +
                       "; open one of them by its path");
  return of_model.empty() ? std::string() : of_model.front();
}

Result<IndexedFiles> IndexedFiles::open(const std::string& root, const std::string& index) {
  IndexedFiles out(TRY(WeightIndex::read(path_join(root, index))));
  out.files_ = out.index_.files();
  out.seen_.resize(out.index_.entries().size());
  return out;
}

std::vector<std::string> IndexedFiles::leave_out(std::optional<IndexedFiles>& index, const std::string& file) {
  return index ? index->leave_out(file) : std::vector<std::string>();
}

std::vector<std::string> IndexedFiles::leave_out(const std::string& file) {
  left_out_.insert(file);
  std::vector<std::string> tensors;
  for (std::size_t i = 0; i < seen_.size(); ++i) {
    if (index_.entries()[i].file != file) continue;
    seen_[i] = true;
    tensors.push_back(index_.entries()[i].name);
  }
  std::sort(tensors.begin(), tensors.end(), natural_less);
  return tensors;
}

bool IndexedFiles::contains(const std::string& file) const {
  return std::binary_search(files_.begin(), files_.end(), file);
}

bool IndexedFiles::is_wanted(const std::string& tensor, const std::string& file, bool is_piece) {
  const auto entry = index_.find(tensor);
  if (!entry) {
    unindexed_.push_back(tensor);
    return true;
  }
  if (index_.entries()[*entry].file == file) return seen_[*entry] = true;
  if (!is_piece) copies_.emplace(tensor, file);
  return is_piece;
}

std::map<std::string, std::vector<std::string>> IndexedFiles::absent() const {
  std::map<std::string, std::vector<std::string>> out;
  for (std::size_t i = 0; i < seen_.size(); ++i)
    if (!seen_[i]) out[index_.entries()[i].file].push_back(index_.entries()[i].name);
  for (auto& [file, tensors] : out) std::sort(tensors.begin(), tensors.end(), natural_less);
  return out;
}

std::string IndexedFiles::other_file(const std::vector<std::string>& tensors) const {
  const bool are_there =
      std::all_of(tensors.begin(), tensors.end(), [&](const std::string& name) { return copies_.contains(name); });
  return are_there && !tensors.empty() ? copies_.at(tensors.front()) : std::string();
}

void IndexedFiles::describe(Catalog& catalog) const {
  catalog.metadata_files.push_back(base_name(index_.path()));
  if (!unindexed_.empty())
    catalog.warnings.push_back("In the files but not in the index: " + names_text(unindexed_, "tensor") +
                               ". They are read.");
  std::vector<std::string> copies;
  for (const auto& [name, file] : copies_)
    if (seen_[*index_.find(name)] && !left_out_.contains(file_of(name))) copies.push_back(name);
  if (!copies.empty())
    catalog.warnings.push_back("In a file other than the index says: " + names_text(copies, "tensor") +
                               ". Only the copy that the index names is read.");
  const Json& total = index_.total_size();
  if (total.is_null() || !left_out_.empty() || !absent().empty()) return;
  const auto stated = total.as_index();
  if (!stated || *stated != catalog.tensor_bytes())
    catalog.warnings.push_back("The index gives a total_size of " + printable(to_text(total).substr(0, 64)) +
                               "; the tensors have " + bytes_of(catalog.tensor_bytes()) + ".");
}

}  // namespace reshard
