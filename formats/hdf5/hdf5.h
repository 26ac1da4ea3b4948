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
}

}  // namespace reshard
