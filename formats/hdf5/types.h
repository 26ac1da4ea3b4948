// SPDX-License-Identifier: Apache-2.0
// Element types in HDF5.
//
//   bool                     an enumeration FALSE, TRUE over an 8-bit integer, as in h5py
//   integers, f16, f32, f64  the type of that name
//   bf16, e5m2               a float of 16 bits with 8 exponent bits, a float of 8 bits with 5 exponent bits
//   bf16 of Keras            opaque values of 2 bytes, as h5py writes NumPy types that it does not know
//   complex                  a compound of r and i, as in h5py
//   e4m3fn, other float8     bytes, and an attribute reshard_dtype with torch's name: HDF5 cannot describe a float
//                            without infinities and with a single NaN
#pragma once

#include <string>

#include "formats/hdf5/library.h"
#include "lib/layout/dtype.h"

namespace reshard::hdf5 {

inline constexpr const char* kDTypeAttribute = "reshard_dtype";

// Returns the HDF5 type of this dtype. Fails with kUnsupported if there is none. The caller must hold the library's
// lock, as for all functions here.
Result<Handle> type_of(DType dtype, bool big_endian = false);
// Returns whether the dtype needs the attribute, because the type alone does not give it.
bool needs_attribute(DType dtype);

struct StoredType {
  DType dtype = DType::kFloat32;
  bool big_endian = false;
};
// Returns the dtype of an HDF5 type. `attribute` is the text of reshard_dtype, or empty. Fails with kUnsupported for
// types that tensors cannot have, and names them: "compound type", "strings".
Result<StoredType> read_type(Id type, const std::string& attribute);
// Returns whether a type is the one in which Keras stores bfloat16.
bool is_opaque_of_two_bytes(Id type);

}  // namespace reshard::hdf5
