// Writes the `.metadata` pickle of a DCP directory, which metadata.h draws.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/format.h"

namespace reshard::dcp {

// One stored item.
struct WrittenItem {
  Box box;  // of a tensor; unused for a blob
  std::uint32_t file = 0;
  Index offset = 0;  // of the item in its file
  Index length = 0;
};
struct WrittenEntry {
  const TargetTensor* tensor = nullptr;  // null: a blob
  std::string name;
  KeyPath path;
  std::vector<WrittenItem> items;
};
// A pickle (protocol 2) that every torch from 2.3 on reads. `files` are the names the items' file numbers stand for.
std::string write_metadata(const std::vector<WrittenEntry>& entries, const std::vector<std::string>& files);

}  // namespace reshard::dcp
