// Lays out an HDF5 archive: one file, a dataset a tensor. See hdf5.h.
#pragma once

#include <memory>

#include "lib/checkpoint/format.h"

namespace reshard::hdf5 {

// Whole tensors, contiguous and page-aligned where large; or, with request.compression, in chunks of about a megabyte
// that are whole runs of the row-major tensor. Unsupported for more than one rank.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);

}  // namespace reshard::hdf5
