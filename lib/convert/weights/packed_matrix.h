// SPDX-License-Identifier: Apache-2.0
// Weights that a checkpoint stores packed (lib/model/quantization.h), as the numbers that the library which wrote them
// computes with. Each family of layouts has a file:
//
//   bitsandbytes.cc     4-bit nf4 and fp4 (absmax quantized itself or not), and LLM.int8()
//   gptq_awq.cc         GPTQ and AWQ: qweight, qzeros, scales, g_idx
//   packed_integers.cc  compressed-tensors pack-quantized and int-quantized
//   nvfp4.cc            4-bit floats with float8 scales: compressed-tensors and ModelOpt
//   compressed_mx.cc    compressed-tensors' floats of 4, 6 and 8 bits with exponents
//
// The order of operations and the dtype of each product are the library's, so that values are equal bit for bit
// (docs/quantization.md).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "lib/image/slab_cache.h"
#include "lib/model/quantization.h"
#include "lib/source/tensor_source.h"

namespace reshard {

// One packed weight that can be read as an ordinary tensor. Thread-safe.
class PackedMatrix {
 public:
  virtual ~PackedMatrix() = default;

  // Computes the elements of `box`, row-major, before they are rounded to rounded_to(). The box has the
  // two dimensions rows and columns (columns()). `stored` has the tensors in which the weight is packed; `scratch` is
  // as in TensorSource::read.
  virtual Status values(TensorSource& stored, const Box& box, std::span<float> out, MutableBytes scratch) const = 0;

  const Dims& shape() const { return shape_; }
  // Returns the length of a row: the weight's last dimension. All other dimensions together are its rows.
  Index columns() const { return shape_.rank() == 0 ? 1 : shape_[shape_.rank() - 1]; }
  // Returns the dtype of the library's result. For another dtype, the caller rounds to this one first.
  DType rounded_to() const { return rounded_to_; }
  // Returns the bytes that a thread needs in values() in addition to `out`.
  Index worker_bytes() const { return worker_bytes_; }

 protected:
  Dims shape_;
  DType rounded_to_ = DType::kFloat32;
  Index worker_bytes_ = 0;
};

// The inputs for opening a packed weight.
struct PackedInput {
  const Catalog& catalog;      // the weight's indices refer to it
  const PackedWeight& weight;  // complete
  const Json& config;          // quantization_config; null if there is none
  // Reads a small tensor whole, in its stored dtype.
  std::function<Result<std::vector<std::byte>>(std::size_t tensor)> read;
  std::shared_ptr<SlabCache> cache;  // of all weights

  const Tensor& tensor(std::string_view role) const { return catalog.tensors()[index(role)]; }
  std::size_t index(std::string_view role) const { return *weight.find(role); }
  bool has(std::string_view role) const { return weight.find(role).has_value(); }
  // Return errors that name the tensor in this role.
  Error corrupt_part(std::string_view role, const std::string& what) const;
  Error unsupported_part(std::string_view role, const std::string& what) const;
  // Checks the shape and that the dtype is one of `dtypes`.
  Status check(std::string_view role, const Dims& shape, std::span<const DType> dtypes) const;
};

using OpenedMatrix = Result<std::unique_ptr<PackedMatrix>>;
OpenedMatrix open_bitsandbytes4(const PackedInput& in);
OpenedMatrix open_bitsandbytes8(const PackedInput& in);
OpenedMatrix open_gptq(const PackedInput& in);
OpenedMatrix open_awq(const PackedInput& in);
OpenedMatrix open_packed_integers(const PackedInput& in);  // int32 words of compressed-tensors
OpenedMatrix open_scaled_integers(const PackedInput& in);  // an int8 matrix next to its scales
OpenedMatrix open_compressed_nvfp4(const PackedInput& in);
OpenedMatrix open_compressed_mxfp4(const PackedInput& in);
OpenedMatrix open_compressed_mxfp6(const PackedInput& in);
OpenedMatrix open_compressed_mxfp8(const PackedInput& in);
OpenedMatrix open_modelopt_nvfp4(const PackedInput& in);

// Returns the shape of a 4-bit weight of bitsandbytes, which its quant_state records.
Result<Dims> bitsandbytes4_shape(const PackedInput& in);

// Returns the transpose of a matrix: [in, out] instead of [out, in] (transposed_weights.h).
std::unique_ptr<PackedMatrix> transposed(std::unique_ptr<PackedMatrix> matrix);

// Opens a packed weight. Fails with unsupported, naming the layout, if can_unpack() is false for it.
OpenedMatrix open_packed(const PackedInput& in);
// Returns whether open_packed() supports the layout.
bool can_unpack(Packing packing);
// Returns what to do with weights that must not be packed: "convert it with --dtype bfloat16 first".
std::string advice_to_unpack(const PackedWeights& packed);

// Fills `out` with the elements of `box` (rows and columns) in dtype `as`. Calls values() for pieces that fit into a
// small buffer, and rounds their elements to rounded_to() and then to `as`.
Status unpack(const PackedMatrix& matrix, TensorSource& stored, DType as, const Box& box, MutableBytes out,
              MutableBytes scratch);

// ---- for those that implement them

template <class Matrix, class... Arguments>
OpenedMatrix opened(Arguments&&... arguments) {
  return std::unique_ptr<PackedMatrix>(std::make_unique<Matrix>(std::forward<Arguments>(arguments)...));
}

inline constexpr DType kPackedFloats[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

// Reads a box of an int32 tensor.
Result<std::vector<std::uint32_t>> read_words(TensorSource& stored, std::size_t tensor, const Box& box,
                                              MutableBytes scratch);
// Reads a box of a tensor of one-byte elements.
Result<std::vector<std::uint8_t>> read_bytes(TensorSource& stored, std::size_t tensor, const Box& box,
                                             MutableBytes scratch);

// Returns the `bits` (at most 8) bits from bit `at` on of a stream of words that are `stride` apart.
inline unsigned bit_field(const std::uint32_t* words, Index stride, Index at, unsigned bits) {
  const Index word = at / 32;
  const auto shift = static_cast<unsigned>(at % 32);
  std::uint64_t both = words[word * stride];
  if (shift + bits > 32) both |= std::uint64_t{words[(word + 1) * stride]} << 32U;
  return static_cast<unsigned>(both >> shift) & ((1U << bits) - 1);
}

// Returns the number of bits, from 1 to 8, with which `fields` fields exactly fill `words` 32-bit words. Nothing if no
// number does, or several do.
std::optional<unsigned> bits_of(Index fields, Index words);

// Assigns columns to groups.
class Groups {
 public:
  // Assigns `columns` columns to `count` groups: as the tensor in `role` lists them or, without such a tensor, in
  // groups of equal size. `size` is the config's group size; 0: it has none. Fails (corrupt or unsupported) if these do
  // not fit together.
  static Result<Groups> make(const PackedInput& in, std::string_view role, Index columns, Index count, Index size);
  // Returns the groups of columns [begin, end). Fails (corrupt) if the tensor names a group that does not exist.
  Result<std::vector<Index>> of(TensorSource& stored, Index begin, Index end, MutableBytes scratch) const;

 private:
  std::optional<std::size_t> index_;
  Index count_ = 0, size_ = 0;
  std::string name_;  // of the tensor, for errors
};

}  // namespace reshard
