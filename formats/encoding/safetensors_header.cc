// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/safetensors_header.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>
#include <utility>

#include "lib/base/cursor.h"
#include "lib/base/json.h"
#include "lib/base/memory_limit.h"
#include "lib/base/text.h"
#include "lib/checkpoint/catalog.h"

namespace reshard {
namespace {

constexpr Index kLengthBytes = SafetensorsHeaderWriter::kBegin;
constexpr std::string_view kMetadataKey = "__metadata__";
constexpr Index kEntriesAtOnce = 1 << 14;  // number of entries to read before reserving memory for more

// ---- Reading

Result<DType> parse_dtype(std::string_view name) {
  if (const auto dtype = dtype_from_safetensors(name)) return *dtype;
  if (name == "F6_E2M3" || name == "F6_E3M2")
    return unsupported("dtype: " + std::string(name) + " packs elements into parts of a byte, which is not supported");
  return unsupported("dtype: unknown element type '" + printable(name.substr(0, 64)) + "'");
}

// The last dimension of F4 counts values in safetensors, and bytes of two values in torch and here.
constexpr Index kValuesPerF4 = 2;

Result<Dims> parse_shape(const Json& value, DType dtype) {
  const auto items = TRY(value.get_array("shape"));
  if (items.size() > std::size_t{kMaxRank})
    return unsupported("shape: expected at most " + std::to_string(kMaxRank) + " dimensions, got " +
                       std::to_string(items.size()));
  Dims shape;
  for (const Json& item : items) {
    const Index extent = TRY(item.as_index().context("shape"));
    if (extent < 0) return corrupt("shape: expected extents of at least 0, got " + std::to_string(extent));
    shape.push_back(extent);
  }
  if (dtype != DType::kFloat4E2M1x2) return shape;
  if (shape.rank() == 0 || shape[shape.rank() - 1] % kValuesPerF4 != 0)
    return unsupported("shape: expected an even last dimension of F4, got " + to_string(shape));
  shape[shape.rank() - 1] /= kValuesPerF4;
  return shape;
}

// Returns the size of a tensor in bytes, from unchecked numbers.
Result<Index> byte_length(const Dims& shape, DType dtype) {
  const auto elements = checked_volume(shape);
  const auto bytes = elements ? checked_mul(*elements, byte_size(dtype)) : std::nullopt;
  if (!bytes) return corrupt("shape: the size of " + to_string(shape) + " is 2^63 bytes or more");
  return *bytes;
}

// Reads an entry. Its offsets are relative to the start of the data, as in the file.
Result<SafetensorsEntry> parse_entry(const std::string& name, const Json& value) {
  const auto members = TRY(value.as_object());
  for (const Json::Member& member : members)
    if (member.key != "dtype" && member.key != "shape" && member.key != "data_offsets")
      return unsupported("unknown field '" + printable(member.key.substr(0, 64)) + "'");
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = TRY(parse_dtype(TRY(value.get_string("dtype"))));
  entry.shape = TRY(parse_shape(value, entry.dtype));
  const auto offsets = TRY(value.get_array("data_offsets"));
  if (offsets.size() != 2) return corrupt("data_offsets: expected 2 numbers, got " + std::to_string(offsets.size()));
  const Index begin = TRY(offsets[0].as_index().context("data_offsets"));
  const Index end = TRY(offsets[1].as_index().context("data_offsets"));
  if (begin < 0 || end < begin)
    return corrupt("data_offsets: expected 0 <= begin <= end, got [" + std::to_string(begin) + ", " +
                   std::to_string(end) + "]");
  const Index bytes = TRY(byte_length(entry.shape, entry.dtype));
  if (end - begin != bytes)
    return corrupt("data_offsets: expected " + bytes_of(bytes) + " for " +
                   std::string(info(entry.dtype).safetensors_name) + " " + to_string(entry.shape) + ", got " +
                   std::to_string(end - begin));
  entry.offset = begin;
  entry.length = bytes;
  return entry;
}

Result<SafetensorsMetadata> parse_metadata(const Json& value) {
  SafetensorsMetadata metadata;
  for (const Json::Member& member : TRY(value.as_object()))
    metadata.emplace_back(member.key, std::string(TRY(value.get_string(member.key))));
  return metadata;
}

// Sorts the entries by the order of their data and returns the end of the data. Fails unless they are back to back from
// 0.
Result<Index> check_contiguous(std::vector<SafetensorsEntry>& entries, const std::string& where) {
  const auto before = [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.length < b.length;  // empty tensors come first
  };
  if (!std::is_sorted(entries.begin(), entries.end(), before)) std::stable_sort(entries.begin(), entries.end(), before);
  Index end = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.offset != end)
      return corrupt(where + ": " + tensor_text(entry.name) + ": expected data from offset " + std::to_string(end) +
                     ", got " + std::to_string(entry.offset) + (entry.offset < end ? ": overlap" : ": hole"));
    end += entry.length;  // was checked for overflow
  }
  return end;
}

// The beginning of the pointer file that a repository cloned without Git LFS has instead of a large file (git-lfs,
// docs/spec.md).
constexpr std::string_view kPointer = "version https://git-lfs";

// Reads the JSON text after the length field, including padding.
Result<std::string> read_json_text(const File& file, Index offset, Index length) {
  const std::string where = at(file.path(), offset) + ": safetensors header";
  if (length < kLengthBytes)
    return corrupt(where + ": expected 8 bytes of length, got " + std::to_string(std::max<Index>(length, 0)) +
                   (length == 0 ? ": the file is empty" : ""));
  std::uint64_t stated = 0;
  TRY(file.read_at(offset, {reinterpret_cast<std::byte*>(&stated), sizeof stated}));
  const Index left = length - kLengthBytes;
  if (std::memcmp(&stated, kPointer.data(), sizeof stated) == 0)
    return corrupt(where +
                   ": expected tensors, got a pointer of Git LFS to the file that has them; git lfs pull gets it");
  if (stated > std::uint64_t{kMaxSafetensorsHeader} && (stated & 0xFF) == '<')
    return corrupt(where + ": expected tensors, got a web page or XML, perhaps an error of the server that the file " +
                   "came from; download it again");
  if (stated > std::uint64_t{kMaxSafetensorsHeader})
    return corrupt(where + ": expected at most " + std::to_string(kMaxSafetensorsHeader) + " bytes, got " +
                   std::to_string(stated));
  if (stated > static_cast<std::uint64_t>(left))
    return corrupt(where + ": expected " + bytes_of(stated) + ", got " + std::to_string(left) + " before the end");
  if (stated < 2) return corrupt(where + ": expected at least 2 bytes, got " + std::to_string(stated));
  char first = 0;
  TRY(file.read_at(offset + kLengthBytes, {reinterpret_cast<std::byte*>(&first), 1}));
  if (first != '{')
    return corrupt(at(file.path(), offset + kLengthBytes) + ": safetensors header: expected '{', got '" +
                   printable({&first, 1}) + "'");
  TRY(may_take(stated, [&] { return where; }));
  std::string text(stated, '\0');
  TRY(file.read_at(offset + kLengthBytes, {reinterpret_cast<std::byte*>(text.data()), text.size()}));
  return text;
}

// Returns the JSON without trailing spaces.
Result<std::string_view> without_padding(std::string_view text, const std::string& path, Index base) {
  const std::size_t last = text.find_last_not_of(' ');
  if (text[last] == '}') return text.substr(0, last + 1);
  return corrupt(at(path, base + static_cast<Index>(last)) +
                 ": safetensors header: expected '}' and spaces at the end, got '" + printable(text.substr(last, 1)) +
                 "'");
}

Status check_end(const SafetensorsHeader& header, const File& file, Index bytes_end, SafetensorsEnd rule) {
  if (rule == SafetensorsEnd::kUnchecked || header.end == bytes_end) return {};
  const std::string where = at(file.path(), header.data_start);
  if (header.end > bytes_end)
    return corrupt(where + ": tensor data: expected " + count_of(header.end - header.data_start, "byte") + ", got " +
                   with_commas(bytes_end - header.data_start) + " before the end: the file is truncated");
  if (rule == SafetensorsEnd::kWithin) return {};
  return corrupt(where + ": tensor data: expected " + count_of(header.end - header.data_start, "byte") + ", got " +
                 with_commas(bytes_end - header.data_start) + ": " + count_of(bytes_end - header.end, "byte") +
                 (bytes_end - header.end == 1 ? " belongs" : " belong") + " to no tensor");
}

// Parses the JSON text at `base`. data_offsets are relative to the start of the data.
Result<SafetensorsHeader> parse_header(std::string_view text, const std::string& path, Index base) {
  SafetensorsHeader header;
  const std::string where = at(path, base);
  const auto on_member = [&](const std::string& key, const Json& value) -> Status {
    if (key == kMetadataKey) {
      header.metadata = TRY(parse_metadata(value).context(where + ": " + std::string(kMetadataKey)));
      return {};
    }
    auto entry = parse_entry(key, value);
    if (!entry) return std::move(entry).error().context(tensor_text(key)).context(where);
    header.entries.push_back(*std::move(entry));
    // Each entry becomes a tensor of a catalog.
    if (const Index n = std::ssize(header.entries); n % kEntriesAtOnce == 0)
      TRY(may_take(n * Catalog::kTensorBytes,
                   [&] { return where + ": safetensors header: " + count_of(n, "tensor") + " and more"; }));
    return {};
  };
  TRY(parse_json_members(text, path, on_member, {}, base));
  header.end = TRY(check_contiguous(header.entries, where));
  return header;
}

}  // namespace

Result<SafetensorsHeader> read_safetensors_header(const File& file, Index offset, Index length, SafetensorsEnd end) {
  const Index base = offset + kLengthBytes;
  const std::string text = TRY(read_json_text(file, offset, length));
  SafetensorsHeader header = TRY(parse_header(TRY(without_padding(text, file.path(), base)), file.path(), base));
  header.data_start = base + std::ssize(text);
  const auto data_end = checked_add(header.data_start, header.end);
  if (!data_end) return corrupt(at(file.path(), base) + ": data_offsets: the end of the data overflows 2^63 bytes");
  header.end = *data_end;
  for (SafetensorsEntry& entry : header.entries) entry.offset += header.data_start;
  TRY(check_end(header, file, offset + length, end));
  return header;
}

Result<SafetensorsHeader> read_safetensors_header(const File& file, SafetensorsEnd end) {
  return read_safetensors_header(file, 0, TRY(file.size()), end);
}

// ---- Writing

namespace {

Status check_writable(std::string_view name, DType dtype) {
  if (info(dtype).safetensors_name.empty())
    return unsupported(tensor_text(name) + ": safetensors has no element type " + std::string(info(dtype).torch_name));
  if (!is_utf8(name)) return unsupported(tensor_text(name) + ": the name is not UTF-8");
  if (name == kMetadataKey) return unsupported(tensor_text(name) + ": safetensors reserves the name");
  return {};
}

// Returns the shape to write.
Result<Dims> counted_shape(const Dims& shape, DType dtype) {
  Dims out = shape;
  if (dtype != DType::kFloat4E2M1x2) return out;
  if (out.rank() == 0) return unsupported("safetensors has no " + std::string(info(dtype).torch_name) + " scalars");
  Index& last = out[out.rank() - 1];
  const auto values = checked_mul(last, kValuesPerF4);
  if (!values) return corrupt("shape: " + to_string(shape) + " has more than 2^63 values");
  last = *values;
  return out;
}

void append_number(std::string& out, Index n) {
  char digits[20];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, n).ptr);
}

}  // namespace

SafetensorsHeaderWriter::SafetensorsHeaderWriter(const SafetensorsMetadata& metadata) : text_("{") {
  if (metadata.empty()) return;
  Json object = Json::object();
  for (const auto& [key, value] : metadata) object.set(key, value);
  append_json_string(text_, kMetadataKey);
  text_ += ":" + to_text(object);
  is_first_ = false;
}

Result<Index> SafetensorsHeaderWriter::add(std::string_view name, DType dtype, const Dims& shape) {
  TRY(check_writable(name, dtype));
  const Index length = TRY(byte_length(shape, dtype).context([&] { return tensor_text(name); }));
  const Dims counted = TRY(counted_shape(shape, dtype).context([&] { return tensor_text(name); }));
  const auto end = checked_add(end_, length);
  if (!end) return unsupported(tensor_text(name) + ": the file's data overflow 2^63 bytes");
  if (!std::exchange(is_first_, false)) text_ += ',';
  append_json_string(text_, name);
  text_ += ":{\"dtype\":\"";
  text_ += info(dtype).safetensors_name;
  text_ += "\",\"shape\":[";
  for (int d = 0; d < counted.rank(); ++d) {
    if (d > 0) text_ += ',';
    append_number(text_, counted[d]);
  }
  text_ += "],\"data_offsets\":[";
  append_number(text_, end_);
  text_ += ',';
  append_number(text_, *end);
  text_ += "]}";
  end_ = *end;
  ++tensors_;
  return length;
}

std::string SafetensorsHeaderWriter::take() {
  taken_ += held();
  return std::exchange(text_, std::string());
}

Result<Index> SafetensorsHeaderWriter::finish(Index align_data_to) {
  text_ += '}';
  const Index end = kBegin + taken_ + held();
  const Index data_start = ceil_div(end, align_data_to) * align_data_to;
  if (data_start - kBegin > kMaxSafetensorsHeader)
    return unsupported("safetensors header: expected at most " + std::to_string(kMaxSafetensorsHeader) +
                       " bytes, got " + std::to_string(data_start - kBegin) + " for " + count_of(tensors_, "tensor"));
  if (!checked_add(data_start, end_)) return unsupported("safetensors header: the file's size overflows 2^63 bytes");
  text_.append(static_cast<std::size_t>(data_start - end), ' ');
  return data_start;
}

std::string SafetensorsHeaderWriter::length_field(Index data_start) {
  const std::uint64_t json_bytes = data_start - kBegin;
  return {reinterpret_cast<const char*>(&json_bytes), sizeof json_bytes};
}

Result<std::string> safetensors_header(std::vector<SafetensorsEntry>& entries, const SafetensorsMetadata& metadata,
                                       Index align_data_to) {
  SafetensorsHeaderWriter writer(metadata);
  Index end = 0;
  for (SafetensorsEntry& entry : entries) {
    entry.offset = end;
    entry.length = TRY(writer.add(entry.name, entry.dtype, entry.shape));
    end += entry.length;
  }
  const Index data_start = TRY(writer.finish(align_data_to));
  for (SafetensorsEntry& entry : entries) entry.offset += data_start;
  return SafetensorsHeaderWriter::length_field(data_start) + writer.take();
}

}  // namespace reshard
