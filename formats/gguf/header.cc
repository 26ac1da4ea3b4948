// SPDX-License-Identifier: Apache-2.0
#include "formats/gguf/header.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "lib/base/checked.h"
#include "lib/base/memory_limit.h"
#include "lib/base/text.h"

namespace reshard::gguf {
namespace {

constexpr std::uint32_t kOldest = 2, kNewest = 3;  // version 1 counts in 32 bits
constexpr Index kLongestName = 1 << 16;
constexpr Index kLongestText = 1 << 24;  // bytes; chat templates are long
constexpr Index kPiece = 1 << 18;        // bytes read at a time
constexpr Index kUsualAlignment = 32;
constexpr int kDeepest = 4;  // arrays of arrays

// gguf-py/gguf/constants.py, GGML_QUANT_SIZES.
constexpr ElementType kTypes[] = {
    {0, "F32", 1, 4, DType::kFloat32},       {1, "F16", 1, 2, DType::kFloat16},
    {2, "Q4_0", 32, 18, DType::kUint8},      {3, "Q4_1", 32, 20, DType::kUint8},
    {6, "Q5_0", 32, 22, DType::kUint8},      {7, "Q5_1", 32, 24, DType::kUint8},
    {8, "Q8_0", 32, 34, DType::kUint8},      {9, "Q8_1", 32, 40, DType::kUint8},
    {10, "Q2_K", 256, 84, DType::kUint8},    {11, "Q3_K", 256, 110, DType::kUint8},
    {12, "Q4_K", 256, 144, DType::kUint8},   {13, "Q5_K", 256, 176, DType::kUint8},
    {14, "Q6_K", 256, 210, DType::kUint8},   {15, "Q8_K", 256, 292, DType::kUint8},
    {16, "IQ2_XXS", 256, 66, DType::kUint8}, {17, "IQ2_XS", 256, 74, DType::kUint8},
    {18, "IQ3_XXS", 256, 98, DType::kUint8}, {19, "IQ1_S", 256, 50, DType::kUint8},
    {20, "IQ4_NL", 32, 18, DType::kUint8},   {21, "IQ3_S", 256, 110, DType::kUint8},
    {22, "IQ2_S", 256, 82, DType::kUint8},   {23, "IQ4_XS", 256, 136, DType::kUint8},
    {24, "I8", 1, 1, DType::kInt8},          {25, "I16", 1, 2, DType::kInt16},
    {26, "I32", 1, 4, DType::kInt32},        {27, "I64", 1, 8, DType::kInt64},
    {28, "F64", 1, 8, DType::kFloat64},      {29, "IQ1_M", 256, 56, DType::kUint8},
    {30, "BF16", 1, 2, DType::kBFloat16},    {34, "TQ1_0", 256, 54, DType::kUint8},
    {35, "TQ2_0", 256, 66, DType::kUint8},   {39, "MXFP4", 32, 17, DType::kUint8},
    {40, "NVFP4", 64, 36, DType::kUint8},    {41, "Q1_0", 128, 18, DType::kUint8},
};

// Types of values in pairs.
enum ValueType : std::uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64,
  kValueTypes,
};
constexpr std::array<Index, kValueTypes> kWidths = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

// Reads a file from its start, a piece at a time.
class Input {
 public:
  static Result<Input> open(const File& file) { return Input(file, TRY(file.size())); }

  Index offset() const { return offset_; }
  Index left() const { return size_ - offset_; }
  void swap_bytes() { is_swapped_ = true; }

  // Names the tensor or pair that is read next, for errors; empty: none.
  void set_subject(std::string subject) { subject_ = std::move(subject); }
  Error error(const std::string& what) const { return corrupt(where() + what); }
  Error unsupported_here(const std::string& what) const { return unsupported(where() + what); }

  Result<std::string> take(Index n, std::string_view what) {
    TRY(expect(n, what));
    std::string out(n, '\0');
    for (Index done = 0; done < n;) {
      if (offset_ >= end()) TRY(refill());
      const Index some = std::min(n - done, end() - offset_);
      std::memcpy(out.data() + done, piece_.data() + (offset_ - begin_), some);
      done += some;
      offset_ += some;
    }
    return out;
  }

  Status skip(Index n, std::string_view what) {
    TRY(expect(n, what));
    offset_ += n;
    if (offset_ > end()) piece_.clear();
    return {};
  }

  // Reads a number of T's width.
  template <class T>
  Result<T> number(std::string_view what) {
    std::string bytes = TRY(take(sizeof(T), what));
    if (is_swapped_) std::reverse(bytes.begin(), bytes.end());
    T out;
    std::memcpy(&out, bytes.data(), sizeof out);
    return out;
  }

  Result<Index> index(std::string_view what) {
    const auto n = TRY(number<std::uint64_t>(what));
    if (n > static_cast<std::uint64_t>(INT64_MAX / 2)) return error(std::string(what) + ": got " + std::to_string(n));
    return static_cast<Index>(n);
  }

  // Reads a count of items of at least `least` bytes each. Fails if the file is too short for them.
  Result<Index> count(Index least, std::string_view what) {
    const auto n = TRY(number<std::uint64_t>(what));
    if (n > static_cast<std::uint64_t>(left() / least))
      return error(std::string(what) + ": " + std::to_string(n) + " do not fit in the " + bytes_of(left()) +
                   " left in the file");
    return static_cast<Index>(n);
  }

  Result<std::string> text(Index longest, std::string_view what) {
    const Index length = TRY(count(1, what));
    if (length > longest)
      return error(std::string(what) + ": expected at most " + bytes_of(longest) + ", got " + std::to_string(length));
    return take(length, what);
  }

 private:
  Input(const File& file, Index size) : file_(&file), size_(size) {}

  Index end() const { return begin_ + std::ssize(piece_); }
  std::string where() const { return at(file_->path(), offset_) + ": " + subject_ + (subject_.empty() ? "" : ": "); }
  Status expect(Index n, std::string_view what) const {
    if (n <= left()) return {};
    return error(std::string(what) + ": expected " + bytes_of(n) + ", got " + std::to_string(left()) +
                 " before the end of the file");
  }
  Status refill() {
    begin_ = offset_;
    piece_.resize(std::min(kPiece, left()));
    return file_->read_at(begin_, {reinterpret_cast<std::byte*>(piece_.data()), piece_.size()});
  }

  const File* file_;
  Index size_ = 0, offset_ = 0, begin_ = 0;
  std::string piece_;  // bytes of the file from begin_ on
  std::string subject_;
  bool is_swapped_ = false;
};

Result<Json> read_scalar(Input& in, std::uint32_t type) {
  constexpr std::string_view kWhat = "value";
  switch (type) {
    case kU8:
      return Json(TRY(in.number<std::uint8_t>(kWhat)));
    case kI8:
      return Json(TRY(in.number<std::int8_t>(kWhat)));
    case kU16:
      return Json(TRY(in.number<std::uint16_t>(kWhat)));
    case kI16:
      return Json(TRY(in.number<std::int16_t>(kWhat)));
    case kU32:
      return Json(TRY(in.number<std::uint32_t>(kWhat)));
    case kI32:
      return Json(TRY(in.number<std::int32_t>(kWhat)));
    case kF32: {
      // Take the shortest decimal number that is this float32: 1e-05 instead of 9.999999747378752e-06.
      const auto value = TRY(in.number<float>(kWhat));
      std::array<char, 32> digits{};
      std::to_chars(digits.data(), digits.data() + digits.size() - 1, value);
      return std::isfinite(value) ? Json(std::strtod(digits.data(), nullptr)) : Json();
    }
    case kBool:
      return Json(TRY(in.number<std::uint8_t>(kWhat)) != 0);
    case kU64:
      return Json(TRY(in.number<std::uint64_t>(kWhat)));
    case kI64:
      return Json(TRY(in.number<std::int64_t>(kWhat)));
    default:
      return Json(TRY(in.number<double>(kWhat)));
  }
}

Status skip_array(Input& in, std::uint32_t type, Index count, int depth);

// Reads an array's type and number of values.
Result<std::pair<std::uint32_t, Index>> read_array_head(Input& in) {
  const auto type = TRY(in.number<std::uint32_t>("type of values"));
  if (type >= kValueTypes) return in.error("type of values: unknown type " + std::to_string(type));
  const Index least = type == kString ? 8 : type == kArray ? 12 : kWidths[type];
  return std::pair(type, TRY(in.count(least, "number of values")));
}

Status skip_value(Input& in, std::uint32_t type, int depth) {
  if (type == kString) return in.skip(TRY(in.count(1, "length of a string")), "string");
  const auto [inner, count] = TRY(read_array_head(in));
  return skip_array(in, inner, count, depth + 1);
}

Status skip_array(Input& in, std::uint32_t type, Index count, int depth) {
  if (depth > kDeepest) return in.error("arrays are nested more than " + std::to_string(kDeepest) + " deep");
  if (kWidths[type] > 0) return in.skip(count * kWidths[type], "values");  // compared with the bytes left above
  for (Index i = 0; i < count; ++i) TRY(skip_value(in, type, depth));
  return {};
}

Result<Json> read_array(Input& in, const std::string& key, Header& out) {
  const auto [type, count] = TRY(read_array_head(in));
  out.lengths.emplace_back(key, count);
  if (kWidths[type] == 0 || count > kLongestArray) {
    TRY(skip_array(in, type, count, 1));
    return Json();
  }
  Json values = Json::array();
  for (Index i = 0; i < count; ++i) values.push_back(TRY(read_scalar(in, type)));
  return values;
}

Status read_pair(Input& in, Header& out) {
  const std::string key = TRY(in.text(kLongestName, "key"));
  in.set_subject("'" + printable(key) + "'");
  const auto type = TRY(in.number<std::uint32_t>("type"));
  if (type >= kValueTypes) return in.error("unknown type " + std::to_string(type));
  Json value;
  if (type == kString)
    value = valid_utf8(TRY(in.text(kLongestText, "string")));
  else if (type == kArray)
    value = TRY(read_array(in, key, out));
  else
    value = TRY(read_scalar(in, type));
  Json* const place = out.metadata.try_add(valid_utf8(key));
  if (!place) return in.error("expected it once, got it twice");
  *place = std::move(value);
  in.set_subject("");
  return {};
}

// Sets shape and size from the extents in the file, the fastest first.
Status set_shape(const Input& in, const std::vector<Index>& extents, TensorInfo& out) {
  const ElementType& type = *out.type;
  for (auto e = extents.rbegin(); e != extents.rend(); ++e) out.shape.push_back(*e);
  out.elements = checked_volume(out.shape).value_or(0);
  if (type.is_quantized()) {
    if (extents.empty() || extents[0] % type.block != 0)
      return in.error("expected rows of a multiple of " + count_of(type.block, "element") + " for " +
                      std::string(type.name) + ", got shape " + to_string(out.shape));
    const auto row = checked_mul(extents[0] / type.block, type.bytes);
    if (!row) return in.error("the size of its rows is 2^63 bytes or more");
    out.shape[out.shape.rank() - 1] = *row;
  }
  const auto elements = checked_volume(out.shape);
  const auto bytes = elements ? checked_mul(*elements, byte_size(type.dtype)) : std::nullopt;
  if (!bytes) return in.error("the size of " + to_string(out.shape) + " is 2^63 bytes or more");
  out.bytes = *bytes;
  return {};
}

Result<TensorInfo> read_tensor(Input& in) {
  TensorInfo out;
  out.name = TRY(in.text(kLongestName, "name of a tensor"));
  in.set_subject(tensor_text(out.name));
  const auto rank = TRY(in.number<std::uint32_t>("dimensions"));
  if (rank > static_cast<std::uint32_t>(kMaxRank))
    return in.error("expected at most " + count_of(kMaxRank, "dimension") + ", got " + std::to_string(rank));
  std::vector<Index> extents;
  for (std::uint32_t d = 0; d < rank; ++d) extents.push_back(TRY(in.index("extent")));
  const auto number = TRY(in.number<std::uint32_t>("type"));
  out.type = find_type(number);
  if (!out.type) return in.unsupported_here("type " + std::to_string(number) + " is unknown");
  TRY(set_shape(in, extents, out));
  out.offset = TRY(in.index("offset"));
  in.set_subject("");
  return out;
}

Result<Index> alignment_of(const Input& in, const Header& header) {
  const Json* const stated = header.find("general.alignment");
  if (!stated) return kUsualAlignment;
  const auto value = stated->as_index();
  if (!value || *value < 1 || *value > (Index{1} << 30))
    return in.error("general.alignment: expected a power of two, got " + to_text(*stated));
  if (!std::has_single_bit(static_cast<std::uint64_t>(*value)))
    return in.error("general.alignment: expected a power of two, got " + std::to_string(*value));
  return *value;
}

Status read_version(Input& in, Header& out) {
  auto version = TRY(in.number<std::uint32_t>("version"));
  if ((version & 0xffff) == 0 && version != 0) {
    in.swap_bytes();
    out.big_endian = true;
    version = (version >> 24) | ((version >> 8) & 0xff00);
  }
  if (version < kOldest || version > kNewest)
    return in.unsupported_here("GGUF version " + std::to_string(version) + "; expected " + std::to_string(kOldest) +
                               " or " + std::to_string(kNewest));
  out.version = version;
  return {};
}

}  // namespace

const ElementType* find_type(std::uint32_t number) {
  const auto* const found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                         [&](const ElementType& type) { return type.number == number; });
  return found == std::end(kTypes) ? nullptr : found;
}

Index Header::length_of(std::string_view key) const {
  const auto found = std::find_if(lengths.begin(), lengths.end(), [&](const auto& row) { return row.first == key; });
  return found == lengths.end() ? 0 : found->second;
}

namespace {

// Makes the tensors' offsets relative to the start of the file.
Status place_tensors(const Input& in, Header& out) {
  const Index alignment = TRY(alignment_of(in, out));
  const Index begin = *checked_round_up(in.offset(), alignment);
  for (TensorInfo& tensor : out.tensors) {
    if (tensor.offset % alignment != 0)
      return in.error(tensor_text(tensor.name) + ": expected an offset that is a multiple of " +
                      std::to_string(alignment) + ", got " + std::to_string(tensor.offset));
    tensor.offset += begin;
  }
  return {};
}

}  // namespace

Result<Header> read_header(const File& file) {
  constexpr Index kLeastPair = 8 + 4 + 1, kLeastTensor = 8 + 4 + 4 + 8, kTensorsAtOnce = 4096;
  Input in = TRY(Input::open(file));
  Header out;
  if (TRY(in.take(std::ssize(kMagic), "magic")) != kMagic) return in.error("expected GGUF at the start of the file");
  TRY(read_version(in, out));
  const Index tensors = TRY(in.count(kLeastTensor, "number of tensors"));
  const Index pairs = TRY(in.count(kLeastPair, "number of pairs"));
  for (Index i = 0; i < pairs; ++i) TRY(read_pair(in, out));
  for (Index i = 0; i < tensors; ++i) {
    if (i % kTensorsAtOnce == 0)
      TRY(may_hold([&] { return file.path() + ": a header of " + count_of(tensors, "tensor"); }));
    out.tensors.push_back(TRY(read_tensor(in)));
  }
  TRY(place_tensors(in, out));
  return out;
}

}  // namespace reshard::gguf
