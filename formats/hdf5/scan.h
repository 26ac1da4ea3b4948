// SPDX-License-Identifier: Apache-2.0
// Lists the content of an HDF5 file with the library: every dataset that is a tensor, and the extents of its bytes.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard::hdf5 {

inline constexpr Index kMaxObjects = 2'000'000;  // groups and datasets of a file
inline constexpr Index kMaxChunks = 65'536;      // of one dataset: the library's lookup of chunk i takes O(i)

// The content of a file.
struct Listing {
  Catalog catalog;  // tensors, and blobs (datasets in /reshard/objects); its root and first file as given
  std::vector<std::pair<std::string, Extent>> side_files;        // in /reshard/files, by name
  std::vector<std::pair<std::string, std::string>> not_tensors;  // path of a dataset, and why it is not a tensor
};

// Lists a file. Reads only metadata, and never runs a filter or follows a link into another file. With `external_too`,
// also locates contiguous data in other files and adds these files to the catalog, relative to the directory of `path`.
Result<Listing> scan(const std::string& path, bool external_too);

// Tries scan() in a child process and fails if it crashes or takes longer than a minute, as the library may with a
// damaged file.
Status scan_in_child(const std::string& path, bool external_too);

}  // namespace reshard::hdf5
