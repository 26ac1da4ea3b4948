// Element types as HDF5 has them.
//
//   bool                     an enumeration FALSE, TRUE over an 8-bit integer, as h5py has it
//   integers, f16, f32, f64  the type of that name; bf16 a float of 16 bits with 8 of exponent, e5m2 one of 8 bits with
//   5 complex                  a compound of r and i, as h5py has it e4m3fn and the other     no such float can be
//   described (no infinity, one NaN): bytes, and an attribute reshard_dtype float8                   with torch's name
#pragma once

#include <string>

#include "formats/hdf5/library.h"
#include "lib/layout/dtype.h"

namespace reshard::hdf5 {

inline constexpr const char* kDTypeAttribute = "reshard_dtype";

// The type that elements of this dtype are stored as. Needs the library's lock, as all here.
Result<Handle> type_of(DType dtype, bool big_endian = false);
// Whether the type alone does not say the dtype, and the attribute has to.
bool needs_attribute(DType dtype);

struct StoredType {
  DType dtype = DType::kFloat32;
  bool big_endian = false;
};
// What elements of this type are; `attribute` is the text of reshard_dtype, empty where there is none. Unsupported for
// types that no tensor has, in words: "compound type", "strings".
Result<StoredType> read_type(Id type, const std::string& attribute);

}  // namespace reshard::hdf5
