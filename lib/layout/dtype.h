// SPDX-License-Identifier: Apache-2.0
// Element types, with their names in torch and safetensors.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "lib/base/checked.h"

namespace reshard {

enum class DType : std::uint8_t {
  kBool,
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kUint64,
  kInt64,
  kFloat8E4M3,
  kFloat8E5M2,
  kFloat8E4M3Fnuz,
  kFloat8E5M2Fnuz,
  kFloat8E8M0,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex32,
  kComplex64,
  kComplex128,
  kFloat4E2M1x2,  // the element is a byte with two values
};

struct DTypeInfo {
  DType dtype;
  std::string_view torch_name;        // "bfloat16", as in torch.bfloat16
  std::string_view safetensors_name;  // "BF16"; empty if safetensors has no name for it
  std::string_view storage_class;     // "BFloat16Storage"; empty if torch.save uses an UntypedStorage
  std::string_view short_name;        // "bf16", for tables
  Index bytes;                        // per element
};

const DTypeInfo& info(DType dtype);
inline Index byte_size(DType dtype) { return info(dtype).bytes; }

std::optional<DType> dtype_from_torch(std::string_view name);
std::optional<DType> dtype_from_safetensors(std::string_view name);
std::optional<DType> dtype_from_storage_class(std::string_view name);
// Returns the type that a person means: "bfloat16", "torch.bfloat16", "half", "bf16", "BF16", "fp16" or "f32".
std::optional<DType> dtype_from_user(std::string_view name);

// Returns whether values can be converted to and from this type.
bool is_floating(DType dtype);

}  // namespace reshard
