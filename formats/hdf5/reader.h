// Opens an HDF5 file as a checkpoint. See hdf5.h.
#pragma once

#include <memory>
#include <string>

#include "lib/checkpoint/format.h"

namespace reshard::hdf5 {

// Ours, or anybody's: every dataset of numbers is a tensor under its path with dots for slashes; others are named in a
// warning. After opening, the library is not needed any more: elements are read and decoded by the engine.
Result<std::unique_ptr<Reader>> open(const std::string& path, const OpenOptions& options);

}  // namespace reshard::hdf5
