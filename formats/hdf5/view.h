// Writes an HDF5 file of a few KB that shows the tensors of another checkpoint where they lie. See hdf5.h.
//
// A tensor in one piece is a dataset whose storage is external: a place in the other file. One in several pieces, or
// with gaps, is a virtual dataset of parts of strips in /reshard/pieces: a strip is a whole file as elements of one
// type. Paths of files are absolute: a library looks for others from the directory its reader happens to be in.
#pragma once

#include <string>

#include "lib/checkpoint/format.h"

namespace reshard::hdf5 {

// The catalog's tensors must be located. The file must not be there; after an error it is not.
Result<ViewReport> write_view(const Catalog& catalog, const std::string& path);

}  // namespace reshard::hdf5
