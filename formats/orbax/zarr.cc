// SPDX-License-Identifier: Apache-2.0
#include "formats/orbax/zarr.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "lib/base/text.h"
#include "lib/device/convert.h"
#include "lib/device/crc32.h"

namespace reshard::orbax {
namespace {

constexpr std::size_t kMaxCodecs = 8;
constexpr Index kMaxInnerChunks = Index{1} << 22;  // per shard
constexpr Index kIndexEntry = 16, kIndexCrc = 4;   // bytes
constexpr std::uint64_t kNotStored = ~std::uint64_t{0};

// ---- Dtypes

struct NamedType {
  std::string_view name;
  DType dtype;
};

// Names that both versions use, in addition to the numpy codes of version 2. A 4-bit element takes a byte, whose upper
// half is 0 whatever its sign.
constexpr NamedType kNamedTypes[] = {{"bool", DType::kBool},
                                     {"int4", DType::kUint8},
                                     {"int8", DType::kInt8},
                                     {"int16", DType::kInt16},
                                     {"int32", DType::kInt32},
                                     {"int64", DType::kInt64},
                                     {"uint4", DType::kUint8},
                                     {"uint8", DType::kUint8},
                                     {"uint16", DType::kUint16},
                                     {"uint32", DType::kUint32},
                                     {"uint64", DType::kUint64},
                                     {"bfloat16", DType::kBFloat16},
                                     {"float16", DType::kFloat16},
                                     {"float32", DType::kFloat32},
                                     {"float64", DType::kFloat64},
                                     {"complex64", DType::kComplex64},
                                     {"complex128", DType::kComplex128},
                                     {"float8_e4m3fn", DType::kFloat8E4M3},
                                     {"float8_e4m3fnuz", DType::kFloat8E4M3Fnuz},
                                     {"float8_e5m2", DType::kFloat8E5M2},
                                     {"float8_e5m2fnuz", DType::kFloat8E5M2Fnuz},
                                     {"float8_e8m0fnu", DType::kFloat8E8M0}};
constexpr NamedType kNumpyTypes[] = {{"b1", DType::kBool},      {"i1", DType::kInt8},       {"i2", DType::kInt16},
                                     {"i4", DType::kInt32},     {"i8", DType::kInt64},      {"u1", DType::kUint8},
                                     {"u2", DType::kUint16},    {"u4", DType::kUint32},     {"u8", DType::kUint64},
                                     {"f2", DType::kFloat16},   {"f4", DType::kFloat32},    {"f8", DType::kFloat64},
                                     {"c8", DType::kComplex64}, {"c16", DType::kComplex128}};

template <std::size_t N>
std::optional<DType> find_type(const NamedType (&types)[N], std::string_view name) {
  for (const NamedType& type : types)
    if (type.name == name) return type.dtype;
  return std::nullopt;
}

// Parses a numpy code, "<f4", or a name.
Status read_type(std::string_view text, ZarrArray& out) {
  out.stored_type = text;
  auto dtype = find_type(kNamedTypes, text);
  if (!dtype && text.size() > 1 && std::string_view("<>|").find(text[0]) != std::string_view::npos) {
    dtype = find_type(kNumpyTypes, text.substr(1));
    out.is_big_endian = text[0] == '>';
  }
  if (!dtype) return unsupported("dtype '" + printable(text) + "' is not read");
  out.dtype = *dtype;
  return {};
}

// ---- Shapes

Result<Dims> read_dims(const Json& json, std::string_view key, Index least) {
  Dims out;
  for (const Json& extent : TRY(json.get_array(key))) {
    if (out.rank() == kMaxRank)
      return unsupported(std::string(key) + ": at most " + std::to_string(kMaxRank) + " dimensions are read");
    const Index value = TRY(extent.as_index().context(key));
    if (value < least)
      return corrupt(std::string(key) + ": expected at least " + std::to_string(least) + ", got " +
                     std::to_string(value));
    out.push_back(value);
  }
  return out;
}

Dims identity(int rank) {
  Dims out;
  for (int d = 0; d < rank; ++d) out.push_back(d);
  return out;
}

Status check_sizes(const ZarrArray& array) {
  for (const Dims& shape : {array.shape, array.grid, array.chunk.shape}) {
    const auto elements = checked_volume(shape);
    if (shape.rank() != array.shape.rank() || !elements || !checked_mul(*elements, byte_size(array.dtype)))
      return corrupt("expected shapes of one rank and less than 2^63 bytes, got " + to_string(array.shape) +
                     " in chunks of " + to_string(shape));
  }
  return {};
}

// ---- Fill values

std::vector<std::byte> bytes_of_number(DType dtype, double value) {
  std::vector<std::byte> out(byte_size(dtype));
  if (can_convert(DType::kFloat64, dtype))
    convert(DType::kFloat64, dtype, reinterpret_cast<const std::byte*>(&value), out.data(), 1);
  else if (value != 0)
    return {};
  return out;
}

std::optional<double> special_number(const Json& value) {
  const auto text = value.as_string();
  if (!text) return std::nullopt;
  if (*text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (*text == "Infinity") return std::numeric_limits<double>::infinity();
  if (*text == "-Infinity") return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

// Returns the fill value as one element. Supports null (zeros), numbers, booleans and the names of infinities and NaN;
// empty for others.
std::vector<std::byte> fill_of(const Json* value, DType dtype) {
  if (!value || value->is_null()) return bytes_of_number(dtype, 0);
  if (const auto flag = value->as_bool(); flag.has_value()) {
    if (dtype != DType::kBool) return bytes_of_number(dtype, *flag ? 1 : 0);
    return {std::byte{*flag}};
  }
  if (const auto number = value->as_index(); number && !is_floating(dtype)) {
    std::vector<std::byte> out(byte_size(dtype));
    if (*number != 0 && (out.size() > sizeof *number || dtype == DType::kComplex64)) return {};
    std::memcpy(out.data(), &*number, std::min(out.size(), sizeof *number));
    return out;
  }
  if (const auto number = value->as_double()) return bytes_of_number(dtype, *number);
  if (const auto number = special_number(*value)) return bytes_of_number(dtype, *number);
  return {};
}

// ---- Codecs

std::string_view id_of(const Json& codec, std::string_view key) {
  const auto id = codec.get_string(key);
  return id ? *id : std::string_view("without a name");
}

// Adds a codec that transforms bytes to bytes.
Status add_filter(std::string_view name, ChunkLayout& chunk) {
  if (name == "blosc") {
    if (!chunk.is_plain()) return unsupported("codec 'blosc' is not read after another one");
    chunk.is_blosc = true;
  } else if (name == "crc32c") {
    chunk.filters.push_back({ChunkFilter::Kind::kCrc32c});
  } else if (chunk.is_blosc) {
    return unsupported("codec '" + printable(name) + "' is not read after blosc");
  } else if (name == "zstd") {
    chunk.filters.push_back({ChunkFilter::Kind::kZstd});
  } else if (name == "gzip") {
    chunk.filters.push_back({ChunkFilter::Kind::kGzip});
  } else if (name == "zlib") {
    chunk.filters.push_back({ChunkFilter::Kind::kDeflate});
  } else {
    return unsupported("codec '" + printable(name) + "' is not supported; supported: zstd, gzip, zlib, blosc, crc32c");
  }
  return {};
}

// Returns the settings of a version 3 codec; an empty object if it has none.
const Json& settings_of(const Json& codec) {
  static const Json kNone = Json::object();
  const Json* const settings = codec.find("configuration");
  return settings ? *settings : kNone;
}

Result<bool> is_big_endian(const Json& codec) {
  const Json* const endian = settings_of(codec).find("endian");
  if (!endian) return false;
  const std::string_view word = TRY(endian->as_string().context("endian"));
  if (word == "little" || word == "big") return word == "big";
  return unsupported("endian '" + printable(word) + "'");
}

// Applies a transpose codec to the order of the stored dimensions.
Status transpose(const Json& codec, Dims& order) {
  const Dims by = TRY(read_dims(settings_of(codec), "order", 0));
  std::array<bool, kMaxRank> seen{};
  Dims out;
  for (const Index d : by) {
    if (d >= order.rank() || std::exchange(seen[d], true))
      return corrupt("transpose: expected an order of " + count_of(order.rank(), "dimension") + ", got " +
                     to_string(by));
    out.push_back(order[static_cast<int>(d)]);
  }
  if (out.rank() != order.rank()) return corrupt("transpose: expected " + count_of(order.rank(), "dimension"));
  order = out;
  return {};
}

// Converts sizes from the stored order of dimensions to the array's order.
Dims in_array_order(const Dims& stored, const Dims& order) {
  Dims out = Dims::filled(order.rank(), 0);
  for (int i = 0; i < order.rank(); ++i) out[static_cast<int>(order[i])] = stored[i];
  return out;
}

Status read_codecs(std::span<const Json> codecs, ZarrArray& out, int depth);

Status read_index_codecs(const Json& settings, ShardIndex& index) {
  const auto codecs = TRY(settings.get_array("index_codecs"));
  for (std::size_t i = 0; i < codecs.size(); ++i) {
    const std::string_view name = id_of(codecs[i], "name");
    if (i == 0 && name == "bytes")
      index.is_big_endian = TRY(is_big_endian(codecs[i]));
    else if (i == 1 && name == "crc32c")
      index.has_crc = true;
    else
      return unsupported("index_codecs: '" + printable(name) + "' is not supported there; supported: bytes, crc32c");
  }
  if (codecs.empty()) return corrupt("index_codecs: expected bytes");
  return {};
}

Status read_sharding(const Json& codec, ZarrArray& out, int depth) {
  if (depth > 0) return unsupported("shards inside shards are not read");
  const Json& settings = settings_of(codec);
  const Dims inner = TRY(read_dims(settings, "chunk_shape", 1));
  if (inner.rank() != out.shape.rank())
    return corrupt("chunk_shape: expected " + count_of(out.shape.rank(), "dimension") + ", got " + to_string(inner));
  ShardIndex index;
  index.order = out.chunk.order;
  if (const Json* const where = settings.find("index_location")) {
    const std::string_view word = TRY(where->as_string().context("index_location"));
    if (word != "start" && word != "end") return unsupported("index_location '" + printable(word) + "'");
    index.is_at_start = word == "start";
  }
  TRY(read_index_codecs(settings, index));
  out.chunk.shape = in_array_order(inner, out.chunk.order);
  for (int d = 0; d < inner.rank(); ++d)
    if (out.grid[d] % out.chunk.shape[d] != 0)
      return corrupt("expected shards " + to_string(out.grid) + " of whole chunks, got " + to_string(out.chunk.shape));
  out.shards = index;
  return read_codecs(TRY(settings.get_array("codecs")), out, depth + 1).context("sharding_indexed");
}

Status read_codecs(std::span<const Json> codecs, ZarrArray& out, int depth) {
  bool has_bytes = false;  // the codec that turns elements into bytes was seen
  if (codecs.size() > kMaxCodecs) return unsupported("more than " + std::to_string(kMaxCodecs) + " codecs");
  for (const Json& codec : codecs) {
    const std::string_view name = id_of(codec, "name");
    if (has_bytes) {
      if (out.shards && depth == 0) return unsupported("codec '" + printable(name) + "' around shards is not read");
      TRY(add_filter(name, out.chunk));
    } else if (name == "transpose") {
      TRY(transpose(codec, out.chunk.order));
    } else if (name == "bytes") {
      out.is_big_endian = TRY(is_big_endian(codec));
      has_bytes = true;
    } else if (name == "sharding_indexed") {
      TRY(read_sharding(codec, out, depth));
      has_bytes = true;
    } else {
      return unsupported("codec '" + printable(name) +
                         "' is not supported there; supported: transpose, bytes, sharding_indexed");
    }
  }
  if (!has_bytes) return corrupt("codecs: expected bytes or sharding_indexed");
  return {};
}

Status read_key_encoding(const Json& json, ZarrArray& out) {
  const Json* const encoding = json.find("chunk_key_encoding");
  const std::string_view name = encoding ? id_of(*encoding, "name") : "default";
  if (name != "default" && name != "v2") return unsupported("chunk_key_encoding '" + printable(name) + "'");
  out.prefix = name == "default" ? "c" : "";
  out.separator = name == "default" ? "/" : ".";
  const Json* const separator = encoding ? settings_of(*encoding).find("separator") : nullptr;
  if (separator) out.separator = TRY(separator->as_string().context("separator"));
  return {};
}

Result<ZarrArray> zarr2_of(const Json& json) {
  ZarrArray out;
  if (TRY(json.get_index("zarr_format")) != 2) return unsupported("zarr_format: expected 2");
  out.shape = TRY(read_dims(json, "shape", 0));
  out.grid = TRY(read_dims(json, "chunks", 1));
  const Json* const dtype = json.find("dtype");
  if (!dtype || !dtype->is_string()) return unsupported("dtype: expected one for all elements, got fields");
  TRY(read_type(TRY(dtype->as_string()), out));
  out.chunk.shape = out.grid;
  out.chunk.order = identity(out.shape.rank());
  const std::string_view order = TRY(json.get_string("order"));
  if (order != "C" && order != "F") return unsupported("order '" + printable(order) + "'");
  if (order == "F") std::reverse(&out.chunk.order[0], &out.chunk.order[0] + out.chunk.order.rank());
  const Json* const filters = json.find("filters");
  if (filters && filters->size() > 0)
    return unsupported("filter '" + printable(id_of(TRY(filters->as_array())[0], "id")) + "' is not read");
  if (const Json* const compressor = json.find("compressor"); compressor && !compressor->is_null())
    TRY(add_filter(id_of(*compressor, "id"), out.chunk));
  out.separator = ".";
  if (const Json* const separator = json.find("dimension_separator"))
    out.separator = TRY(separator->as_string().context("dimension_separator"));
  out.fill = fill_of(json.find("fill_value"), out.dtype);
  return out;
}

Result<ZarrArray> zarr3_of(const Json& json) {
  ZarrArray out;
  if (TRY(json.get_index("zarr_format")) != 3) return unsupported("zarr_format: expected 3");
  if (const auto type = TRY(json.get_string("node_type")); type != "array")
    return unsupported("node_type: expected an array, got '" + printable(type) + "'");
  out.shape = TRY(read_dims(json, "shape", 0));
  const Json* const type = json.find("data_type");
  if (!type || !type->is_string()) return unsupported("data_type: expected a name, got an extension");
  TRY(read_type(TRY(type->as_string()), out));
  const Json* const grid = json.find("chunk_grid");
  if (!grid || id_of(*grid, "name") != "regular") return unsupported("chunk_grid: only a regular one is read");
  out.grid = TRY(read_dims(settings_of(*grid), "chunk_shape", 1).context("chunk_grid"));
  if (out.grid.rank() != out.shape.rank())
    return corrupt("chunk_shape: expected " + count_of(out.shape.rank(), "dimension") + ", got " + to_string(out.grid));
  out.chunk.shape = out.grid;
  out.chunk.order = identity(out.shape.rank());
  TRY(read_codecs(TRY(json.get_array("codecs")), out, 0).context("codecs"));
  if (const Json* const more = json.find("storage_transformers"); more && more->size() > 0)
    return unsupported("storage_transformers are not read");
  TRY(read_key_encoding(json, out));
  out.fill = fill_of(json.find("fill_value"), out.dtype);
  return out;
}

Result<ZarrArray> parse(std::string_view text, const std::string& place, Result<ZarrArray> (*read)(const Json&)) {
  const Json json = TRY(parse_json(text, place));
  ZarrArray out = TRY(read(json).context(place));
  if (out.separator != "." && out.separator != "/")
    return unsupported(place + ": separator '" + printable(out.separator) + "'");
  TRY(check_sizes(out).context(place));
  return out;
}

}  // namespace

Dims ChunkLayout::strides() const {
  Dims stored;
  for (const Index d : order) stored.push_back(shape[static_cast<int>(d)]);
  return in_array_order(row_major_strides(stored), order);
}

Dims ZarrArray::counts() const {
  Dims out;
  for (int d = 0; d < shape.rank(); ++d) out.push_back(ceil_div(shape[d], grid[d]));
  return out;
}

Box ZarrArray::box_of(const Dims& number) const {
  Box box{number, grid};
  for (int d = 0; d < number.rank(); ++d) box.origin[d] *= grid[d];
  return intersect(box, whole(shape));
}

std::string ZarrArray::key_of(const Dims& number) const {
  std::string out = prefix;
  for (const Index n : number) out += (out.empty() ? "" : separator) + std::to_string(n);
  return out.empty() ? "0" : out;
}

Result<ZarrArray> parse_zarr2(std::string_view text, const std::string& place) { return parse(text, place, zarr2_of); }
Result<ZarrArray> parse_zarr3(std::string_view text, const std::string& place) { return parse(text, place, zarr3_of); }

Json list_of(const Dims& dims) {
  Json out = Json::array();
  for (const Index n : dims) out.push_back(n);
  return out;
}

namespace {

Json configured(std::string_view name, Json configuration) {
  return Json::object().set("name", name).set("configuration", std::move(configuration));
}

// Returns the dtype as version 2 names it: by numpy's code if numpy has the type.
std::string name_in_version2(DType dtype, std::string_view name) {
  for (const NamedType& type : kNumpyTypes)
    if (type.dtype == dtype) return (byte_size(dtype) == 1 ? "|" : "<") + std::string(type.name);
  return std::string(name);
}

}  // namespace

std::optional<std::string> zarr_text(const ZarrForm& form, DType dtype, const Dims& shape, const Dims& grid) {
  const auto is_named = [&](const NamedType& t) { return t.dtype == dtype && !t.name.ends_with("int4"); };
  const auto type = std::find_if(std::begin(kNamedTypes), std::end(kNamedTypes), is_named);
  if (type == std::end(kNamedTypes)) return std::nullopt;
  Json out = Json::object();
  out.set("zarr_format", form.version).set("shape", list_of(shape));
  if (form.version == 2) {
    out.set("chunks", list_of(grid)).set("dtype", name_in_version2(dtype, type->name)).set("fill_value", Json());
    out.set("order", "C").set("filters", Json()).set("dimension_separator", ".");
    Json compressor;
    if (form.zstd_level > 0) compressor = Json::object().set("id", "zstd").set("level", form.zstd_level);
    return to_text(out.set("compressor", std::move(compressor)));
  }
  Json fill = is_floating(dtype) ? Json(0.0) : Json(0);
  if (dtype == DType::kBool) fill = false;
  if (dtype == DType::kComplex64 || dtype == DType::kComplex128) fill = Json::array().push_back(0.0).push_back(0.0);
  out.set("node_type", "array").set("data_type", type->name);
  out.set("chunk_grid", configured("regular", Json::object().set("chunk_shape", list_of(grid))));
  out.set("chunk_key_encoding", configured("default", Json::object().set("separator", "/")));
  out.set("fill_value", std::move(fill));
  Json codecs = Json::array().push_back(configured("bytes", Json::object().set("endian", "little")));
  if (form.zstd_level > 0)
    codecs.push_back(configured("zstd", Json::object().set("level", form.zstd_level).set("checksum", true)));
  return to_text(out.set("codecs", std::move(codecs)));
}

// ---- shards

namespace {

// Returns the number of inner chunks per dimension, in the order in which the index counts them.
Dims counts_in_shard(const ZarrArray& array) {
  Dims out;
  for (const Index d : array.shards->order)
    out.push_back(array.grid[static_cast<int>(d)] / array.chunk.shape[static_cast<int>(d)]);
  return out;
}

// Returns the box of an inner chunk, relative to the shard's first element.
Box box_of_inner(const ZarrArray& array, const Dims& counts, Index number) {
  Dims at = Dims::filled(counts.rank(), 0);
  for (int i = counts.rank() - 1; i >= 0; --i) {
    at[i] = number % counts[i];
    number /= counts[i];
  }
  Box box{in_array_order(at, array.shards->order), array.chunk.shape};
  for (int d = 0; d < box.rank(); ++d) box.origin[d] *= array.chunk.shape[d];
  return box;
}

}  // namespace

Result<IndexPlace> place_of_index(const ZarrArray& array, Index length) {
  const auto count = checked_volume(counts_in_shard(array));
  if (!count || *count > kMaxInnerChunks)
    return unsupported("shards of more than " + with_commas(kMaxInnerChunks) + " chunks are not read");
  const Index bytes = *count * kIndexEntry + (array.shards->has_crc ? kIndexCrc : 0);
  if (bytes > length)
    return corrupt("shard: expected an index of " + bytes_of(bytes) + ", the shard has " + std::to_string(length));
  return IndexPlace{array.shards->is_at_start ? 0 : length - bytes, bytes};
}

Result<std::vector<InnerChunk>> parse_shard_index(const ZarrArray& array, Bytes index, Index length) {
  Bytes entries = index;
  if (array.shards->has_crc) {
    entries = index.first(index.size() - std::size_t{kIndexCrc});
    std::uint32_t recorded = 0;
    std::memcpy(&recorded, index.data() + entries.size(), sizeof recorded);
    if (const std::uint32_t crc = crc32c(0, entries); crc != recorded)
      return corrupt("index of the shard: CRC-32C: expected " + std::to_string(recorded) + ", got " +
                     std::to_string(crc) + ": the bytes changed after they were saved");
  }
  const Dims counts = counts_in_shard(array);
  const bool is_swapped = array.shards->is_big_endian;
  std::vector<InnerChunk> out;
  for (Index i = 0; i < volume(counts); ++i) {
    std::array<std::uint64_t, 2> entry{};
    std::memcpy(entry.data(), entries.data() + i * kIndexEntry, sizeof entry);
    if (is_swapped)
      for (std::uint64_t& number : entry) number = __builtin_bswap64(number);
    InnerChunk chunk{box_of_inner(array, counts, i), std::nullopt};
    if (entry[0] != kNotStored || entry[1] != kNotStored) {
      const auto offset = to_index(entry[0]), bytes = to_index(entry[1]);
      if (!offset || !bytes || !fits_inside(*offset, *bytes, length))
        return corrupt("index of the shard: chunk " + std::to_string(i) + " at " + std::to_string(entry[0]) + " of " +
                       bytes_of(entry[1]) + " is outside of the shard's " + bytes_of(length));
      chunk.bytes = {*offset, *bytes};
    }
    out.push_back(chunk);
  }
  return out;
}

}  // namespace reshard::orbax
