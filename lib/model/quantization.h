// SPDX-License-Identifier: Apache-2.0
// Packed weights: several tensors of a checkpoint that together are one weight, such as GPTQ's qweight, qzeros, scales
// and g_idx, or a float8 matrix and its scales. None of them means anything alone: rounding a scale, averaging packed
// integers or dropping one tensor destroys the weight. Every command calls find_packed() to learn which tensors these
// are.
//
// A packed weight is recognised by the names and dtypes of its tensors, so no config.json is needed. If there is one,
// its quant_method resolves what the tensors leave open.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"
#include "lib/model/config.h"

namespace reshard {

// How a weight is packed. packed_layouts.cc has the tensors of each, and the producer's source file.
enum class Packing : std::uint8_t {
  kUnknown,             // packed values next to something named like a scale, in no layout below
  kBitsandbytes4,       // nf4, fp4
  kBitsandbytes8,       // LLM.int8()
  kGptq,                // GPTQModel, AutoGPTQ, auto-round
  kAwq,                 // AutoAWQ
  kCompressedNvfp4,     // compressed-tensors nvfp4-pack-quantized
  kCompressedMxfp4,     // compressed-tensors mxfp4-pack-quantized
  kCompressedMxfp6,     // compressed-tensors mxfp6-pack-quantized
  kCompressedMxfp8,     // compressed-tensors mxfp8-quantized
  kCompressedPacked,    // compressed-tensors pack-quantized: integers of few bits in int32
  kCompressedMarlin24,  // compressed-tensors marlin-24
  kCompressedSparse,    // compressed-tensors sparse-24-bitmask, sparse-bitmask
  kModeloptNvfp4,       // NVIDIA ModelOpt
  kMxfp4,               // gpt-oss
  kHqq,                 // SINQ too
  kQuanto,              // optimum-quanto
  kTorchao,             // tensor subclasses, flattened
  kAqlm,
  kVptq,
  kSpqr,
  kHiggs,
  kFpQuant,
  kEetq,
  kExl2,
  kExl3,
  kAffine,   // uint32 with scales and biases: MLX, transformers' Metal
  kBitnet,   // four ternary values a byte
  kInteger,  // integers with scales: compressed-tensors int-quantized, Quark, Gemma
  kFloat8,   // float8 with scales: "_scale", "_scale_inv"
  kGgml,     // llama.cpp's blocks of quantized elements
};

// One tensor of a packed weight.
struct PackedTensor {
  std::string role;        // as in packed_layouts.cc: "qweight", "absmax"
  std::size_t tensor = 0;  // index into the catalog that find_packed() was given
};

struct PackedWeight {
  Packing packing = Packing::kUnknown;
  std::string name;                  // plain key of the unpacked weight: "model.layers.0.mlp.up_proj.weight"
  std::vector<PackedTensor> parts;   // in the order of the layout's table
  std::vector<std::string> missing;  // plain keys of absent tensors without which the values cannot be recovered

  std::optional<std::size_t> find(std::string_view role) const;  // the tensor with this role
};

// The packed weights of a catalog. Indices refer to that catalog's tensors, in the order they had.
class PackedWeights {
 public:
  std::vector<PackedWeight> weights;  // sorted by name

  bool empty() const { return weights.empty(); }
  // Returns the weight that a tensor is part of; null for all other tensors.
  const PackedWeight* of(std::size_t tensor) const;
  // Whether a tensor is part of a packed weight, or a scale of activations or caches ("k_scale") in a checkpoint with
  // packed weights: its value has a meaning only together with the quantization.
  bool is_of(std::size_t tensor) const { return tensor < of_.size() && of_[tensor] != kNone; }

 private:
  friend PackedWeights find_packed(const Catalog& catalog, const ModelConfig* config);
  static constexpr std::uint32_t kNone = ~std::uint32_t{0}, kBeside = kNone - 1;
  std::vector<std::uint32_t> of_;  // by tensor: index into `weights`, kBeside or kNone; empty if nothing is packed
};

// Finds the packed weights among the model tensors of a catalog, by their plain keys. `config` may be null.
PackedWeights find_packed(const Catalog& catalog, const ModelConfig* config);

// Returns what is wrong with the tensors of a packed weight by themselves, as a clause without a full stop: "its shapes
// disagree: qweight [8, 64], ...". Nothing if they fit together, or if the layout is unknown. Missing tensors are in
// PackedWeight::missing.
std::optional<std::string> shape_fault(const Catalog& catalog, const PackedWeight& weight);

// Returns whether families name, shape and cut the tensors of this packing (NameRule::quantized). Every other packed
// weight keeps its names and is never cut.
constexpr bool is_known_to_families(Packing packing) {
  return packing == Packing::kFloat8 || packing == Packing::kMxfp4;
}

// Returns the title for people: "GPTQ", "bitsandbytes 4-bit".
std::string_view packing_title(Packing packing);
// Returns "14 weights packed as GPTQ", or "1 weight packed as AWQ, 2 as float8 with scales".
std::string packed_text(const PackedWeights& packed);
// Returns the tensors next to a packed weight that belong to neither a packed weight nor its activations and are not
// its bias. They may change what the weight means: ModelOpt's pre_quant_scale multiplies the weight's inputs.
std::vector<std::size_t> unknown_beside(const Catalog& catalog, const PackedWeights& packed);

}  // namespace reshard
