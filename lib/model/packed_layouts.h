// SPDX-License-Identifier: Apache-2.0
// Tables of the tensors of each kind of packed weight, for quantization.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "lib/model/quantization.h"

namespace reshard {

// How the name of a tensor is derived from the weight's. The module of the weight "a.b.weight" is "a.b.", its leaf
// "weight".
enum class PackedName : std::uint8_t {
  kAfter,      // appended to the weight's name: "a.b.weight" + "_scale"
  kInModule,   // replaces the leaf, which must be "weight": "a.b." + "qweight"
  kFlattened,  // appended to the leaf, which gets an underscore in front: "a.b." + "_" + "weight" + "_qdata"
};

// The dtypes that a tensor may have.
enum class PackedDType : std::uint8_t {
  kAny,
  kFloat,  // float16 and wider
  kInteger,
  kByte,  // int8, uint8
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kFloat8,
  kExponent,  // uint8, float8_e8m0fnu
};
bool fits(PackedDType class_of, DType dtype);

struct PackedRole {
  std::string_view role;
  PackedName where = PackedName::kAfter;
  std::string_view name;
  PackedDType dtype = PackedDType::kAny;
  bool is_sign = false;    // this name suggests the layout
  bool is_proof = false;   // the presence of such a tensor, in its dtype, confirms the layout
  bool is_needed = false;  // without a tensor of this role the values cannot be recovered
};

struct PackedLayout {
  Packing packing;
  std::string_view title;
  std::span<const std::string_view> methods;  // quant_method in config.json
  std::span<const PackedRole> roles;
  // Which other tensors belong to the weight: none; all of the module except its bias; all whose name begins with the
  // weight's, flattened or followed by ':'.
  enum class Rest : std::uint8_t { kNone, kModule, kFlattened } rest = Rest::kNone;
  Index values = 0;  // elements of the weight per element of the first role's tensor; 0: varies
};

// Equations between the shapes of a layout's tensors: "qweight[1] = scales[1]". "[-1]" is the last dimension, "size(x)"
// the number of elements. An equation about an absent tensor or dimension counts as true.
using ShapeEquations = std::span<const std::string_view>;
// Returns alternative sets of equations, one of which must hold; none if nothing is known.
std::span<const ShapeEquations> shape_equations(Packing packing);

// Returns how many elements the unpacked weight has, or nothing if the shapes of its tensors do not tell.
std::optional<Index> unpacked_elements(const Catalog& catalog, const PackedWeight& weight);

// Returns the layouts in the order in which they are tried: a layout precedes others that its tensors would also match.
std::span<const PackedLayout> packed_layouts();

}  // namespace reshard
