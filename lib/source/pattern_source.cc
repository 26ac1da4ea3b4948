// SPDX-License-Identifier: Apache-2.0
#include "lib/source/pattern_source.h"

#include <algorithm>
#include <cstring>

#include "lib/device/digest.h"

namespace reshard {
namespace {

constexpr Index kWord = 8;  // bytes

// Which bits of a hashed word are kept and which are set.
struct Bits {
  std::uint64_t keep = ~std::uint64_t{0};
  std::uint64_t set = 0;
};

// The same bits in each part of a word.
constexpr Bits repeated(std::uint64_t keep, std::uint64_t set, int part_bits) {
  Bits out{0, 0};
  for (int shift = 0; shift < 64; shift += part_bits) {
    out.keep |= keep << shift;
    out.set |= set << shift;
  }
  return out;
}

// Floats keep their sign, their mantissa and the exponent's low bits.
Bits bits_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return repeated(0x01, 0, 8);
    case DType::kFloat8E4M3:
    case DType::kFloat8E4M3Fnuz:
      return repeated(0x9f, 0x20, 8);
    case DType::kFloat8E5M2:
    case DType::kFloat8E5M2Fnuz:
      return repeated(0x8f, 0x30, 8);
    case DType::kFloat8E8M0:
      return repeated(0x07, 0x78, 8);
    case DType::kFloat16:
    case DType::kComplex32:
      return repeated(0x8fff, 0x3000, 16);
    case DType::kBFloat16:
      return repeated(0x83ff, 0x3c00, 16);
    case DType::kFloat32:
    case DType::kComplex64:
      return repeated(0x83ffffff, 0x3c000000, 32);
    case DType::kFloat64:
    case DType::kComplex128:
      return repeated(0x807fffffffffffff, 0x3f80000000000000, 64);
    default:
      return {};
  }
}

std::uint64_t seed_of(std::string_view name) {
  std::uint64_t seed = 0x9e3779b97f4a7c15u;
  for (const char c : name) seed = digest_mix(seed + static_cast<unsigned char>(c));
  return seed;
}

// The values of a tensor as row-major bytes.
class ValueBytes {
 public:
  ValueBytes(std::string_view name, DType dtype) : seed_(seed_of(name)), bits_(bits_of(dtype)) {}

  // Fills `out` with bytes [begin, begin + out.size()) of the tensor.
  void fill(Index begin, MutableBytes out) const {
    Index number = begin / kWord;
    std::size_t done = 0;
    if (const Index into = begin % kWord; into != 0) {
      const std::uint64_t first = word(number++);
      done = std::min<std::size_t>(out.size(), kWord - into);
      std::memcpy(out.data(), reinterpret_cast<const std::byte*>(&first) + into, done);
    }
    for (; out.size() - done >= kWord; done += kWord) {
      const std::uint64_t next = word(number++);
      std::memcpy(out.data() + done, &next, kWord);
    }
    if (done == out.size()) return;
    const std::uint64_t last = word(number);
    std::memcpy(out.data() + done, &last, out.size() - done);
  }

 private:
  std::uint64_t word(Index number) const {
    return (digest_mix(seed_ + static_cast<std::uint64_t>(number)) & bits_.keep) | bits_.set;
  }

  std::uint64_t seed_;
  Bits bits_;
};

}  // namespace

PatternSource::PatternSource(Catalog catalog) : catalog_(std::move(catalog)) {
  for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
    Tensor& tensor = catalog_.tensor(i);
    Fragment fragment = dense_fragment(whole(tensor.shape), {});
    fragment.extent.length = tensor.bytes();
    tensor.fragments = FragmentList(tensor.shape.rank());
    tensor.fragments.add(fragment);
    tensor.replicas = FragmentList(tensor.shape.rank());
    tensor.located = true;
  }
}

Status PatternSource::read_pieces(std::size_t number, const Box& box, const PieceFilter& wanted, MutableBytes out,
                                  MutableBytes) {
  if (wanted && !wanted({box})) return {};
  const Tensor& tensor = catalog_.tensors()[number];
  fill_pattern(tensor.name, tensor.dtype, tensor.shape, box, out);
  return {};
}

void fill_pattern(std::string_view name, DType dtype, const Dims& shape, const Box& box, MutableBytes out) {
  if (box.empty()) return;
  const ValueBytes values(name, dtype);
  const Index element_bytes = byte_size(dtype);
  const Dims strides = row_major_strides(shape);
  // The trailing dimensions that the box spans completely, and one more, form contiguous runs.
  int outer = box.rank();
  Index run = 1;
  while (outer > 0) {
    --outer;
    run *= box.shape[outer];
    if (box.shape[outer] != shape[outer]) break;
  }
  const std::size_t run_bytes = run * element_bytes;
  Dims at = box.origin;
  for (std::size_t done = 0; done < out.size(); done += run_bytes) {
    Index first = 0;
    for (int d = 0; d < box.rank(); ++d) first += at[d] * strides[d];
    values.fill(first * element_bytes, out.subspan(done, run_bytes));
    for (int d = outer - 1; d >= 0 && ++at[d] == box.end(d); --d) at[d] = box.begin(d);
  }
}

}  // namespace reshard
