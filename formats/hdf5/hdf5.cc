#include "formats/hdf5/hdf5.h"

#include "formats/hdf5/library.h"
#include "formats/hdf5/reader.h"
#include "formats/hdf5/target.h"
#include "formats/hdf5/view.h"

namespace reshard {

const Format kHdf5Format = {
    .name = "hdf5",
    .title = "HDF5",
    .recognises = hdf5::is_hdf5_file,
    .open = hdf5::open,
    .lay_out = hdf5::lay_out,
    .keeps_side_files = true,
    .holds_whole_tensors = true,
};

// Read as any HDF5 file: by the row before.
const Format kHdf5ViewFormat = {
    .name = "hdf5-view",
    .title = "HDF5 view",
    .recognises = [](const std::string&) { return false; },
    .open = hdf5::open,
    .lay_out = nullptr,
    .write_view = hdf5::write_view,
};

}  // namespace reshard
