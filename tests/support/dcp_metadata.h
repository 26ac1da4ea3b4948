// DCP metadata of a few entries that a test makes up.
#pragma once

#include <string>
#include <vector>

#include "formats/dcp/metadata.h"

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

// `files` are the names that the items' file numbers stand for.
inline std::string write_metadata(const std::vector<WrittenEntry>& entries, const std::vector<std::string>& files) {
  std::string out;
  (void)write_metadata(GivenEntries(entries, files), [&](std::string_view bytes) -> Status {
    out += bytes;
    return {};
  });
  return out;
}

}  // namespace reshard::dcp
