// SPDX-License-Identifier: Apache-2.0
#include "formats/hdf5/types.h"

#include <hdf5.h>

#include <cstdint>
#include <cstring>
#include <optional>

#include "lib/base/text.h"

namespace reshard::hdf5 {
namespace {

// Makes a float type with sign, exponent and mantissa, from the highest bit down.
Result<Handle> small_float(std::size_t bytes, std::size_t exponent, std::size_t mantissa, std::size_t bias) {
  Handle type = TRY(checked(H5Tcopy(H5T_IEEE_F32LE), ErrorCode::kInternal, "float type"));
  // Set the fields first, because they must fit the size at any time.
  const bool done = H5Tset_fields(type.get(), exponent + mantissa, mantissa, exponent, 0, mantissa) >= 0 &&
                    H5Tset_ebias(type.get(), bias) >= 0 && H5Tset_precision(type.get(), 8 * bytes) >= 0 &&
                    H5Tset_size(type.get(), bytes) >= 0;
  TRY(checked_call(done ? 0 : -1, ErrorCode::kInternal, "float type"));
  return type;
}

Result<Handle> bool_type() {
  Handle type = TRY(checked(H5Tenum_create(H5T_STD_I8LE), ErrorCode::kInternal, "bool type"));
  const std::int8_t no = 0, yes = 1;
  TRY(checked_call(H5Tenum_insert(type.get(), "FALSE", &no), ErrorCode::kInternal, "bool type"));
  TRY(checked_call(H5Tenum_insert(type.get(), "TRUE", &yes), ErrorCode::kInternal, "bool type"));
  return type;
}

// Returns the dtype of the real part of a complex dtype.
std::optional<DType> part_of(DType dtype) {
  if (dtype == DType::kComplex32) return DType::kFloat16;
  if (dtype == DType::kComplex64) return DType::kFloat32;
  if (dtype == DType::kComplex128) return DType::kFloat64;
  return std::nullopt;
}

Result<Handle> complex_type(DType part, bool big_endian) {
  const Handle member = TRY(type_of(part, big_endian));
  const std::size_t bytes = byte_size(part);
  Handle type = TRY(checked(H5Tcreate(H5T_COMPOUND, 2 * bytes), ErrorCode::kInternal, "complex type"));
  TRY(checked_call(H5Tinsert(type.get(), "r", 0, member.get()), ErrorCode::kInternal, "complex type"));
  TRY(checked_call(H5Tinsert(type.get(), "i", bytes, member.get()), ErrorCode::kInternal, "complex type"));
  return type;
}

std::optional<hid_t> predefined(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
    case DType::kFloat8E4M3:
    case DType::kFloat8E4M3Fnuz:
    case DType::kFloat8E5M2Fnuz:
    case DType::kFloat8E8M0:
      return H5T_STD_U8LE;
    case DType::kInt8:
      return H5T_STD_I8LE;
    case DType::kUint16:
      return H5T_STD_U16LE;
    case DType::kInt16:
      return H5T_STD_I16LE;
    case DType::kUint32:
      return H5T_STD_U32LE;
    case DType::kInt32:
      return H5T_STD_I32LE;
    case DType::kUint64:
      return H5T_STD_U64LE;
    case DType::kInt64:
      return H5T_STD_I64LE;
    case DType::kFloat32:
      return H5T_IEEE_F32LE;
    case DType::kFloat64:
      return H5T_IEEE_F64LE;
    default:
      return std::nullopt;
  }
}

bool is_bool(hid_t type) {
  char name[8] = {};
  const std::int8_t values[2] = {0, 1};
  if (H5Tget_size(type) != 1 || H5Tget_nmembers(type) != 2) return false;
  for (const char* wanted : {"FALSE", "TRUE"}) {
    const bool yes = wanted[0] == 'T';
    // In a hostile file either name may be long, so the library gets room only for the expected one.
    if (H5Tenum_nameof(type, &values[yes ? 1 : 0], name, sizeof name) < 0 || std::strcmp(name, wanted) != 0)
      return false;
  }
  return true;
}

struct FloatShape {
  std::size_t sign = 0, exponent_at = 0, exponent = 0, mantissa_at = 0, mantissa = 0, bias = 0;
};

std::optional<DType> float_of(hid_t type) {
  FloatShape f;
  if (H5Tget_fields(type, &f.sign, &f.exponent_at, &f.exponent, &f.mantissa_at, &f.mantissa) < 0) return std::nullopt;
  f.bias = H5Tget_ebias(type);
  const std::size_t bits = 8 * H5Tget_size(type);
  const bool usual = f.sign == bits - 1 && f.mantissa_at == 0 && f.exponent_at == f.mantissa &&
                     f.exponent + f.mantissa + 1 == bits && f.bias + 1 == std::size_t{1} << (f.exponent - 1) &&
                     H5Tget_norm(type) == H5T_NORM_IMPLIED;
  if (!usual) return std::nullopt;
  if (bits == 64 && f.exponent == 11) return DType::kFloat64;
  if (bits == 32 && f.exponent == 8) return DType::kFloat32;
  if (bits == 16 && f.exponent == 5) return DType::kFloat16;
  if (bits == 16 && f.exponent == 8) return DType::kBFloat16;
  if (bits == 8 && f.exponent == 5) return DType::kFloat8E5M2;
  return std::nullopt;
}

std::optional<DType> integer_of(hid_t type) {
  const bool is_signed = H5Tget_sign(type) == H5T_SGN_2;
  if (H5Tget_precision(type) != 8 * H5Tget_size(type)) return std::nullopt;
  switch (H5Tget_size(type)) {
    case 1:
      return is_signed ? DType::kInt8 : DType::kUint8;
    case 2:
      return is_signed ? DType::kInt16 : DType::kUint16;
    case 4:
      return is_signed ? DType::kInt32 : DType::kUint32;
    case 8:
      return is_signed ? DType::kInt64 : DType::kUint64;
    default:
      return std::nullopt;
  }
}

// Returns the dtype of a compound of two floats of the same type, one after the other, or nothing for other compounds.
std::optional<StoredType> complex_of(hid_t type) {
  if (H5Tget_nmembers(type) != 2 || H5Tget_member_offset(type, 0) != 0) return std::nullopt;
  const Handle first(H5Tget_member_type(type, 0)), second(H5Tget_member_type(type, 1));
  if (!first.ok() || !second.ok() || H5Tequal(first.get(), second.get()) <= 0) return std::nullopt;
  const std::size_t bytes = H5Tget_size(first.get());
  if (H5Tget_class(first.get()) != H5T_FLOAT || H5Tget_member_offset(type, 1) != bytes ||
      H5Tget_size(type) != 2 * bytes)
    return std::nullopt;
  for (const DType complex : {DType::kComplex32, DType::kComplex64, DType::kComplex128})
    if (float_of(first.get()) == part_of(complex))
      return StoredType{complex, H5Tget_order(first.get()) == H5T_ORDER_BE};
  return std::nullopt;
}

std::string class_text(H5T_class_t c) {
  switch (c) {
    case H5T_STRING:
      return "strings";
    case H5T_COMPOUND:
      return "a compound type";
    case H5T_REFERENCE:
      return "references";
    case H5T_VLEN:
      return "a type of variable length";
    case H5T_ARRAY:
      return "an array type";
    case H5T_ENUM:
      return "an enumeration";
    case H5T_OPAQUE:
      return "an opaque type";
    case H5T_INTEGER:
      return "an integer type of unusual width";
    case H5T_FLOAT:
      return "a float type of unusual width";
    default:
      return "a type that tensors cannot have";
  }
}

}  // namespace

bool needs_attribute(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E4M3Fnuz || dtype == DType::kFloat8E5M2Fnuz ||
         dtype == DType::kFloat8E8M0;
}

Result<Handle> type_of(DType dtype, bool big_endian) {
  Handle type;
  if (const auto id = predefined(dtype))
    type = TRY(checked(H5Tcopy(*id), ErrorCode::kInternal, "type"));
  else if (dtype == DType::kBool)
    type = TRY(bool_type());
  else if (dtype == DType::kFloat16)
    type = TRY(small_float(2, 5, 10, 15));
  else if (dtype == DType::kBFloat16)
    type = TRY(small_float(2, 8, 7, 127));
  else if (dtype == DType::kFloat8E5M2)
    type = TRY(small_float(1, 5, 2, 15));
  else if (const auto part = part_of(dtype))
    return complex_type(*part, big_endian);
  else
    return unsupported("HDF5 has no type for " + std::string(info(dtype).torch_name) + "; leave it out with --exclude");
  if (big_endian && byte_size(dtype) > 1) H5Tset_order(type.get(), H5T_ORDER_BE);
  return type;
}

bool is_opaque_of_two_bytes(Id type) { return H5Tget_class(type) == H5T_OPAQUE && H5Tget_size(type) == 2; }

Result<StoredType> read_type(Id type, const std::string& attribute) {
  const H5T_class_t c = H5Tget_class(type);
  StoredType out;
  out.big_endian = H5Tget_order(type) == H5T_ORDER_BE;
  if (c == H5T_INTEGER) {
    if (const auto dtype = integer_of(type)) {
      out.dtype = *dtype;
      if (attribute.empty()) return out;
      const auto named = dtype_from_torch(attribute);
      if (!named || byte_size(*named) != byte_size(out.dtype))
        return corrupt("attribute reshard_dtype: expected a type of " + bytes_of(byte_size(out.dtype)) + ", got '" +
                       printable(attribute) + "'");
      out.dtype = *named;
      return out;
    }
  }
  if (c == H5T_FLOAT) {
    if (const auto dtype = float_of(type)) {
      out.dtype = *dtype;
      return out;
    }
  }
  if (c == H5T_ENUM && is_bool(type)) return StoredType{DType::kBool, false};
  if (c == H5T_COMPOUND)
    if (const auto complex = complex_of(type)) return *complex;
  return unsupported(class_text(c));
}

}  // namespace reshard::hdf5
