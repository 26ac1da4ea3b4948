// The tensors of each kind of packed weight, as data. For quantization.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "lib/model/quantization.h"

namespace reshard {

// Where the name of a tensor comes from. The weight is "a.b.weight": its module is "a.b.", its leaf "weight".
enum class PackedName : std::uint8_t {
  kAfter,      // follows the weight's name: "a.b.weight" + "_scale"
  kInModule,   // replaces the leaf, which is "weight": "a.b." + "qweight"
  kFlattened,  // follows the leaf, with an underscore before that: "a.b." + "_" + "weight" + "_qdata"
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
  bool is_sign = false;    // the name suggests this layout
  bool is_proof = false;   // one that is present, in its dtype, confirms the layout
  bool is_needed = false;  // without it (under any name of this role) the values cannot be recovered
};

struct PackedLayout {
  Packing packing;
  std::string_view title;
  std::span<const std::string_view> methods;  // quant_method in config.json
  std::span<const PackedRole> roles;
  // What else belongs to it: nothing; every tensor of the module but its bias; every tensor whose name begins with the
  // weight's, flattened or followed by ':'.
  enum class Rest : std::uint8_t { kNone, kModule, kFlattened } rest = Rest::kNone;
};

// Equations between the shapes of a layout's tensors: "qweight[1] = scales[1]". "[-1]" is the last dimension, "size(x)"
// the number of elements. An equation about an absent tensor or dimension holds.
using ShapeEquations = std::span<const std::string_view>;
// The alternatives, of which one must hold; none: nothing is known.
std::span<const ShapeEquations> shape_equations(Packing packing);

// In the order in which they are tried: a layout comes before others that its tensors would fit as well.
std::span<const PackedLayout> packed_layouts();

}  // namespace reshard
