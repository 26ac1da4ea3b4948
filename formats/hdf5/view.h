// Writes an HDF5 file of a few KB that shows the tensors of another checkpoint where they lie. See hdf5.h.
//
// A tensor in one piece is a dataset whose storage is external: a place in the other file. One in several pieces is a
// virtual dataset over such datasets, one a piece, in /reshard/pieces. Paths are as relative to the view's directory
// where both are in one tree, so that the tree may move.
#pragma once

#include <string>

#include "lib/checkpoint/format.h"

namespace reshard::hdf5 {

// The catalog's tensors must be located. The file must not be there; after an error it is not.
Result<ViewReport> write_view(const Catalog& catalog, const std::string& path);

}  // namespace reshard::hdf5
