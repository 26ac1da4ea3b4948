// Writes DCP metadata with the entries that a test lists.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/dcp/metadata.h"
#include "formats/dcp/stored_rows.h"
#include "lib/base/file.h"

namespace reshard::dcp {

struct WrittenEntry {
  const TargetTensor* tensor = nullptr;  // null: a blob
  std::string name;
  KeyPath path;
  std::vector<WrittenItem> items;
};

class GivenEntries : public MetadataContents {
 public:
  GivenEntries(const std::vector<WrittenEntry>& entries, const std::vector<std::string>& files)
      : entries_(entries), files_(files) {}
  std::size_t entries() const override { return entries_.size(); }
  Entry entry(std::size_t e) const override {
    const WrittenEntry& given = entries_[e];
    Entry out{given.name, given.path, std::nullopt, {}};
    if (given.tensor) {
      out.dtype = given.tensor->dtype;
      out.shape = given.tensor->shape;
    }
    return out;
  }
  void each_item(std::size_t e, const VisitItem& visit) const override {
    for (const WrittenItem& item : entries_[e].items) visit(item);
  }
  std::string_view file(std::uint32_t number) const override { return files_[number]; }

 private:
  const std::vector<WrittenEntry>& entries_;
  const std::vector<std::string>& files_;
};

// Returns the pickle of a .metadata. `files` are the names for the entries' file numbers.
inline std::string write_metadata(const std::vector<WrittenEntry>& entries, const std::vector<std::string>& files) {
  std::string out;
  (void)write_metadata(GivenEntries(entries, files), [&](std::string_view bytes) -> Status {
    out += bytes;
    return {};
  });
  return out;
}

// Returns the catalog of a `.metadata` parsed row by row; nothing if that parser does not accept it.
inline std::optional<Catalog> read_by_rows(const File& file) {
  Catalog catalog;
  StoredRows rows;
  const auto document = pickle::parse_records(file, rows);
  if (!document) return std::nullopt;
  MetadataReader reader(catalog, &rows);
  if (!reader.add(*document, file.path()) || !reader.finish()) return std::nullopt;
  return catalog;
}

// Returns whether two catalogs are equal.
inline bool are_same(const Catalog& a, const Catalog& b) {
  if (a.tensors().size() != b.tensors().size() || a.blobs.size() != b.blobs.size() ||
      a.files.size() != b.files.size() || a.warnings != b.warnings)
    return false;
  for (std::size_t i = 0; i < a.files.size(); ++i)
    if (a.files[i].path != b.files[i].path || a.files[i].writer != b.files[i].writer) return false;
  for (std::size_t i = 0; i < a.tensors().size(); ++i) {
    const Tensor &x = a.tensors()[i], &y = b.tensors()[i];
    if (x.name != y.name || x.shape != y.shape || x.path != y.path || x.located != y.located) return false;
    if (!is_same_data(x, y) || x.fragments.size() != y.fragments.size() || !x.replicas.empty()) return false;
  }
  for (std::size_t i = 0; i < a.blobs.size(); ++i) {
    const Blob &x = a.blobs[i], &y = b.blobs[i];
    if (x.name != y.name || x.extent != y.extent || x.path != y.path || x.copies != y.copies) return false;
  }
  return true;
}

}  // namespace reshard::dcp
