// SPDX-License-Identifier: Apache-2.0
#include "formats/hdf5/hdf5.h"

#include "formats/hdf5/library.h"

namespace reshard {

const Format kHdf5Format = {
    .name = "hdf5",
    .title = "HDF5",
    .recognises = [](const PathSnapshot& place) -> Result<bool> { return hdf5::is_hdf5_file(place); },
    .open = hdf5::open,
    .lay_out = hdf5::lay_out,
    .is_file = true,
    .takes_compression = true,
    .library = hdf5::library_version,
};

// Read like any HDF5 file, by the row above.
const Format kHdf5ViewFormat = {
    .name = "hdf5-view",
    .title = "HDF5 view",
    .recognises = nullptr,
    .open = hdf5::open,
    .lay_out = nullptr,
    .write_view = hdf5::write_view,
    .is_file = true,
};

}  // namespace reshard
