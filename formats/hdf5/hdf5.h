// SPDX-License-Identifier: Apache-2.0
// HDF5: a checkpoint as one file that h5py, h5dump, MATLAB and HDFView read.
//
//   model.h5
//     /model/layers/0/self_attn/q_proj/weight    a dataset for each tensor; the dots in its name become groups
//     /reshard/tensors/N                         a tensor whose name cannot be a path (attribute reshard_name)
//     /reshard/objects/N                         an object: a torch.save archive, as bytes
//     /reshard/files/config.json                 a file that other formats keep next to the tensors, as bytes
//
// The archive (--to hdf5) holds the data, contiguous or in zstd chunks. The view (--to hdf5-view) has a few KB and
// refers to the files of another checkpoint. docs/formats/hdf5.md has the drawing.
#pragma once

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kHdf5Format;
extern const Format kHdf5ViewFormat;

namespace hdf5 {

inline constexpr int kZstdFilter = 32015;  // as registered with The HDF Group

// Opens an HDF5 file, ours or another. Every dataset of numbers is a tensor, named by its path with dots for slashes; a
// warning lists the other datasets. The library is needed only for opening: the engine reads and decodes the elements.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// Lays out whole tensors, contiguous and, if large, page-aligned. With request.compression they are stored in chunks of
// about a megabyte, each a run of the row-major tensor. Fails with kUnsupported for more than one rank.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);

// Writes a file that shows the tensors of another checkpoint in place. A tensor in one run of bytes is a dataset with
// external storage, a range of the other file. A tensor with gaps or several fragments is a virtual dataset made of
// strips in /reshard/pieces; a strip is a whole file seen as elements of one type. Paths are absolute, because the
// library resolves relative ones against the reader's working directory. The catalog's tensors must be located. Unless
// `replace` is set the file must not exist. After an error nothing has changed.
Result<ViewReport> write_view(const Catalog& catalog, const std::string& path, bool replace);

}  // namespace hdf5
}  // namespace reshard
