// SPDX-License-Identifier: Apache-2.0
#include "lib/layout/dtype.h"

#include <array>
#include <cctype>
#include <string>
#include <utility>

namespace reshard {
namespace {

// In the order of the enum.
constexpr std::array<DTypeInfo, 22> kTable = {{
    {DType::kBool, "bool", "BOOL", "BoolStorage", "bool", 1},
    {DType::kUint8, "uint8", "U8", "ByteStorage", "u8", 1},
    {DType::kInt8, "int8", "I8", "CharStorage", "i8", 1},
    {DType::kUint16, "uint16", "U16", "", "u16", 2},
    {DType::kInt16, "int16", "I16", "ShortStorage", "i16", 2},
    {DType::kUint32, "uint32", "U32", "", "u32", 4},
    {DType::kInt32, "int32", "I32", "IntStorage", "i32", 4},
    {DType::kUint64, "uint64", "U64", "", "u64", 8},
    {DType::kInt64, "int64", "I64", "LongStorage", "i64", 8},
    {DType::kFloat8E4M3, "float8_e4m3fn", "F8_E4M3", "", "f8e4m3", 1},
    {DType::kFloat8E5M2, "float8_e5m2", "F8_E5M2", "", "f8e5m2", 1},
    {DType::kFloat8E4M3Fnuz, "float8_e4m3fnuz", "F8_E4M3FNUZ", "", "f8e4m3z", 1},
    {DType::kFloat8E5M2Fnuz, "float8_e5m2fnuz", "F8_E5M2FNUZ", "", "f8e5m2z", 1},
    {DType::kFloat8E8M0, "float8_e8m0fnu", "F8_E8M0", "", "f8e8m0", 1},
    {DType::kFloat16, "float16", "F16", "HalfStorage", "f16", 2},
    {DType::kBFloat16, "bfloat16", "BF16", "BFloat16Storage", "bf16", 2},
    {DType::kFloat32, "float32", "F32", "FloatStorage", "f32", 4},
    {DType::kFloat64, "float64", "F64", "DoubleStorage", "f64", 8},
    {DType::kComplex32, "complex32", "", "", "c32", 4},
    {DType::kComplex64, "complex64", "C64", "ComplexFloatStorage", "c64", 8},
    {DType::kComplex128, "complex128", "", "ComplexDoubleStorage", "c128", 16},
    {DType::kFloat4E2M1x2, "float4_e2m1fn_x2", "F4", "", "f4e2m1x2", 1},
}};

std::optional<DType> find(std::string_view DTypeInfo::*name, std::string_view wanted) {
  if (wanted.empty()) return std::nullopt;
  for (const DTypeInfo& row : kTable)
    if (row.*name == wanted) return row.dtype;
  return std::nullopt;
}

// Returns ASCII letters in one case, and other characters as they are.
std::string cased(std::string_view text, int (*convert)(int)) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(convert(static_cast<unsigned char>(c)));
  return out;
}

}  // namespace

const DTypeInfo& info(DType dtype) { return kTable[static_cast<std::size_t>(dtype)]; }

std::optional<DType> dtype_from_torch(std::string_view name) { return find(&DTypeInfo::torch_name, name); }
std::optional<DType> dtype_from_safetensors(std::string_view name) { return find(&DTypeInfo::safetensors_name, name); }
std::optional<DType> dtype_from_storage_class(std::string_view name) { return find(&DTypeInfo::storage_class, name); }

std::optional<DType> dtype_from_user(std::string_view name) {
  constexpr std::string_view kModule = "torch.";
  // torch's other names.
  static constexpr std::array<std::pair<std::string_view, DType>, 3> kOthers = {
      {{"half", DType::kFloat16}, {"float", DType::kFloat32}, {"double", DType::kFloat64}}};
  std::string lower = cased(name, std::tolower);
  if (lower.starts_with(kModule)) lower.erase(0, kModule.size());
  for (const auto& [other, dtype] : kOthers)
    if (lower == other) return dtype;
  if (lower.starts_with("fp")) lower.erase(1, 1);
  for (const DTypeInfo& row : kTable)
    if (lower == row.torch_name || lower == row.short_name) return row.dtype;
  return find(&DTypeInfo::safetensors_name, cased(lower, std::toupper));
}

bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

}  // namespace reshard
