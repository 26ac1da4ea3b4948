// Lists what an HDF5 file holds, with the library's help: every dataset that is a tensor, and where its bytes lie.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard::hdf5 {

inline constexpr Index kMaxObjects = 2'000'000;  // groups and datasets of a file
inline constexpr Index kMaxChunks = 65'536;      // of one dataset: the library looks each of them up from the first on

struct Listing {
  Catalog catalog;  // tensors, blobs (datasets of /reshard/objects); its root and first file as given
  std::vector<std::pair<std::string, Extent>> side_files;        // of /reshard/files, by name
  std::vector<std::pair<std::string, std::string>> not_tensors;  // paths of datasets, and why
};

// Reads metadata only, and never runs a filter or follows a link into another file. With `external_too` contiguous data
// in other files are located there; those files become files of the catalog, relative to `path`'s directory.
Result<Listing> scan(const std::string& path, bool external_too);

// Whether the library gets through that: tried in a process of its own, where a damaged file that crashes the library,
// or holds it up for more than a minute, does no harm.
Status survives_scan(const std::string& path, bool external_too);

}  // namespace reshard::hdf5
