// HDF5: a checkpoint as one file that h5py, h5dump, MATLAB and HDFView read.
//
//   model.h5
//     /model/layers/0/self_attn/q_proj/weight    a dataset a tensor: its dotted name as groups
//     /reshard/tensors/N                         tensors whose name is no path (attribute reshard_name)
//     /reshard/objects/N                         what is not a tensor: torch.save archives, as bytes
//     /reshard/files/config.json                 files that lie beside the tensors elsewhere, as bytes
//
// The archive (--to hdf5) holds the data, contiguous or in zstd chunks. The view (--to hdf5-view) is a few KB that
// refer to the files of another checkpoint. docs/formats/hdf5.md has the drawing.
#pragma once

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kHdf5Format;
extern const Format kHdf5ViewFormat;

namespace hdf5 {

inline constexpr int kZstdFilter = 32015;  // as registered with The HDF Group

// Ours, or anybody's: every dataset of numbers is a tensor under its path with dots for slashes; others are named in a
// warning. After opening, the library is not needed any more: elements are read and decoded by the engine.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// Whole tensors, contiguous and page-aligned where large; or, with request.compression, in chunks of about a megabyte
// that are whole runs of the row-major tensor. Unsupported for more than one rank.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);

// A file that shows the tensors of another checkpoint where they lie. A tensor in one run of bytes is a dataset whose
// storage is external: a place in the other file. One of several fragments, or with gaps, is a virtual dataset of parts
// of strips in /reshard/pieces: a strip is a whole file as elements of one type. Paths of files are absolute: a library
// looks for others from the directory its reader happens to be in. The catalog's tensors must be located. Without
// `replace` the file must not be there; after an error all is as it was.
Result<ViewReport> write_view(const Catalog& catalog, const std::string& path, bool replace);

}  // namespace hdf5
}  // namespace reshard
