#include "formats/encoding/safetensors_header.h"

#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"

namespace reshard::safetensors_header_test {
namespace {

std::string u64(std::uint64_t v) { return {reinterpret_cast<const char*>(&v), sizeof v}; }

std::string file_of(const std::string& json, std::size_t data_bytes) {
  return u64(json.size()) + json + std::string(data_bytes, 'd');
}

// Returns a file with one tensor 'w' that has these fields.
std::string one(const std::string& fields, std::size_t data_bytes) {
  return file_of("{\"w\":{" + fields + "}}", data_bytes);
}

class SafetensorsHeaderTest : public testing::Test {
 protected:
  Result<SafetensorsHeader> read(std::string_view bytes, SafetensorsEnd end = SafetensorsEnd::kExact) {
    dir_.write("m.safetensors", bytes);
    return read_safetensors_header(TRY(File::open(dir_ / "m.safetensors")), end);
  }

  // Returns why the bytes are refused, without the directory.
  std::string refusal(std::string_view bytes, SafetensorsEnd end = SafetensorsEnd::kExact) {
    const auto header = read(bytes, end);
    if (header) return "accepted";
    code_ = header.error().code();
    const std::string& message = header.error().message();
    EXPECT_TRUE(message.starts_with(dir_.path() + "/")) << message;
    return message.substr(dir_.path().size() + 1);
  }

  TempDir dir_;
  ErrorCode code_ = ErrorCode::kInternal;
};

TEST_F(SafetensorsHeaderTest, ReadsAFileOfARealProducer) {
  const auto file = File::open(std::string(RESHARD_TEST_DATA) + "/safetensors/tp8.safetensors");
  ASSERT_TRUE(file);
  const auto header = read_safetensors_header(*file);
  ASSERT_TRUE(header) << header.error().message();
  EXPECT_EQ(header->entries.size(), 39u);
  EXPECT_EQ(header->metadata, (SafetensorsMetadata{{"format", "pt"}}));
  EXPECT_EQ(header->data_start, 8 + 4032);
  EXPECT_EQ(header->end, 466248);
  const SafetensorsEntry& first = header->entries.front();
  EXPECT_EQ(first.name, "lm_head.weight");
  EXPECT_EQ(first.dtype, DType::kBFloat16);
  EXPECT_EQ(first.shape, (Dims{257, 64}));
  EXPECT_EQ(first.offset, 4040);
  EXPECT_EQ(first.length, 32896);
}

TEST_F(SafetensorsHeaderTest, EntriesComeInTheOrderOfTheirData) {
  const auto header = read(file_of(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},)"
                                   R"("e":{"shape":[0,9],"data_offsets":[1,1],"dtype":"F32"},)"
                                   R"("a":{"dtype":"I8","shape":[],"data_offsets":[0,1]}}  )",
                                   3));
  ASSERT_TRUE(header) << header.error().message();
  ASSERT_EQ(header->entries.size(), 3u);
  EXPECT_EQ(header->entries[0].name, "a");
  EXPECT_EQ(header->entries[0].shape.rank(), 0);
  EXPECT_EQ(header->entries[1].name, "e");
  EXPECT_EQ(header->entries[1].length, 0);
  EXPECT_EQ(header->entries[2].name, "b");
  EXPECT_EQ(header->entries[2].offset, header->data_start + 1);
}

TEST_F(SafetensorsHeaderTest, AcceptsAFileOfNoTensors) {
  EXPECT_TRUE(read(file_of("{}", 0)));
  EXPECT_EQ(refusal(file_of("{}", 1)),
            "m.safetensors@0xa: tensor data: expected 0 bytes, got 1: 1 byte belongs to no tensor");
}

// ---- Inputs that broke other readers

TEST_F(SafetensorsHeaderTest, V1ProductsThatWrapToZeroAreRefused) {
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0])", 0)),
            "m.safetensors@0x8: tensor 'w': shape: the size of [4294967296, 4294967296] is 2^63 bytes or more");
  EXPECT_EQ(refusal(one(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])", 0)),
            "m.safetensors@0x8: tensor 'w': shape: the size of [2305843009213693952] is 2^63 bytes or more");
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0])", 0)),
            "m.safetensors@0x8: tensor 'w': shape: the size of [0, 4294967296, 4294967296] is 2^63 bytes or more");
}

TEST_F(SafetensorsHeaderTest, V2NegativeExtentsAreRefused) {
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[-2,-3],"data_offsets":[0,6])", 6)),
            "m.safetensors@0x8: tensor 'w': shape: expected extents of at least 0, got -2");
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,1])", 1)),
            "m.safetensors@0x8: tensor 'w': shape: expected an integer below 2^63, got 18446744073709551615");
}

TEST_F(SafetensorsHeaderTest, V3OffsetsThatRunBackwardsAreRefused) {
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[4],"data_offsets":[4,0])", 4)),
            "m.safetensors@0x8: tensor 'w': data_offsets: expected 0 <= begin <= end, got [4, 0]");
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[4],"data_offsets":[-4,0])", 4)),
            "m.safetensors@0x8: tensor 'w': data_offsets: expected 0 <= begin <= end, got [-4, 0]");
}

TEST_F(SafetensorsHeaderTest, V4OffsetsThatDoNotFitTheShapeAreRefused) {
  EXPECT_EQ(refusal(one(R"("dtype":"F32","shape":[4],"data_offsets":[0,4])", 4)),
            "m.safetensors@0x8: tensor 'w': data_offsets: expected 16 bytes for F32 [4], got 4");
  EXPECT_EQ(refusal(one(R"("dtype":"F32","shape":[],"data_offsets":[0,0])", 0)),
            "m.safetensors@0x8: tensor 'w': data_offsets: expected 4 bytes for F32 [], got 0");
}

TEST_F(SafetensorsHeaderTest, V5UnknownElementTypesAreRefusedByName) {
  EXPECT_EQ(refusal(one(R"("dtype":"F128","shape":[1],"data_offsets":[0,16])", 16)),
            "m.safetensors@0x8: tensor 'w': dtype: unknown element type 'F128'");
  EXPECT_EQ(code_, ErrorCode::kUnsupported);
  for (const char* name : {"F6_E2M3", "F6_E3M2"}) {
    EXPECT_EQ(refusal(one("\"dtype\":\"" + std::string(name) + R"(","shape":[4],"data_offsets":[0,3])", 3)),
              "m.safetensors@0x8: tensor 'w': dtype: " + std::string(name) +
                  " packs elements into parts of a byte, which is not supported");
    EXPECT_EQ(code_, ErrorCode::kUnsupported);
  }
}

TEST_F(SafetensorsHeaderTest, V5FourBitFloatsHaveTwoValuesPerByte) {
  for (const std::string shape : {"[]", "[3]", "[2, 3]"}) {
    EXPECT_EQ(refusal(one(R"("dtype":"F4","shape":)" + shape + R"(,"data_offsets":[0,3])", 3)),
              "m.safetensors@0x8: tensor 'w': shape: expected an even last dimension of F4, got " + shape);
    EXPECT_EQ(code_, ErrorCode::kUnsupported);
  }
  EXPECT_EQ(refusal(one(R"("dtype":"F4","shape":[2,6],"data_offsets":[0,12])", 12)),
            "m.safetensors@0x8: tensor 'w': data_offsets: expected 6 bytes for F4 [2, 3], got 12");
}

TEST_F(SafetensorsHeaderTest, V6TheHeadersLengthIsComparedBeforeItIsUsed) {
  EXPECT_EQ(refusal(u64(100) + "{}"),
            "m.safetensors@0x0: safetensors header: expected 100 bytes, got 2 before the end");
  EXPECT_EQ(refusal(u64(UINT64_MAX) + "{}"),
            "m.safetensors@0x0: safetensors header: expected at most 100000000 bytes, got 18446744073709551615");
  EXPECT_EQ(refusal(u64(UINT64_MAX - 7) + "{}"),
            "m.safetensors@0x0: safetensors header: expected at most 100000000 bytes, got 18446744073709551608");
  EXPECT_EQ(refusal(u64(100'000'001) + "{}"),
            "m.safetensors@0x0: safetensors header: expected at most 100000000 bytes, got 100000001");
  EXPECT_EQ(refusal(u64(0) + "{}"), "m.safetensors@0x0: safetensors header: expected at least 2 bytes, got 0");
  EXPECT_EQ(refusal(""), "m.safetensors@0x0: safetensors header: expected 8 bytes of length, got 0: the file is empty");
}

TEST_F(SafetensorsHeaderTest, V7DuplicateKeysAreRefused) {
  const std::string w = R"("w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_EQ(refusal(file_of("{" + w + "," + w + "}", 1)), "m.safetensors@0x3f: duplicate key 'w'");
  EXPECT_EQ(refusal(one(R"("dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1])", 1)),
            "m.safetensors@0x21: duplicate key 'dtype'");
  EXPECT_EQ(refusal(file_of(R"({"__metadata__":{},"__metadata__":{}})", 0)),
            "m.safetensors@0x28: duplicate key '__metadata__'");
}

TEST_F(SafetensorsHeaderTest, V8BytesThatBelongToNoTensorAreRefused) {
  const std::string fields = R"("dtype":"U8","shape":[4],"data_offsets":[0,4])";
  EXPECT_EQ(refusal(one(fields, 4)), "accepted");
  EXPECT_EQ(refusal(one(fields, 5)),
            "m.safetensors@0x3d: tensor data: expected 4 bytes, got 5: 1 byte belongs to no tensor");
  EXPECT_EQ(refusal(one(fields, 3)),
            "m.safetensors@0x3d: tensor data: expected 4 bytes, got 3 before the end: the file is truncated");
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[4],"data_offsets":[1,5])", 5)),
            "m.safetensors@0x8: tensor 'w': expected data from offset 0, got 1: hole");
}

TEST_F(SafetensorsHeaderTest, OverlapsAreRefused) {
  EXPECT_EQ(refusal(file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                            R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
                            6)),
            "m.safetensors@0x8: tensor 'b': expected data from offset 4, got 2: overlap");
  EXPECT_EQ(refusal(file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                            R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                            4)),
            "m.safetensors@0x8: tensor 'b': expected data from offset 4, got 0: overlap");
}

TEST_F(SafetensorsHeaderTest, TheLastEndMustNotOverflow) {
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[9223372036854775807],"data_offsets":[0,9223372036854775807])", 0)),
            "m.safetensors@0x8: data_offsets: the end of the data overflows 2^63 bytes");
}

TEST_F(SafetensorsHeaderTest, TheJsonIsOneObjectFromTheFirstByteToThePadding) {
  EXPECT_EQ(refusal(file_of(" {}", 0)), "m.safetensors@0x8: safetensors header: expected '{', got ' '");
  EXPECT_EQ(refusal(file_of("[]", 0)), "m.safetensors@0x8: safetensors header: expected '{', got '['");
  EXPECT_EQ(refusal(file_of("{}\n", 0)),
            "m.safetensors@0xa: safetensors header: expected '}' and spaces at the end, got '\\x0a'");
  EXPECT_EQ(refusal(file_of("{}{}", 0)),
            "m.safetensors@0xa: syntax error while parsing value - unexpected '{'; expected end of input");
  EXPECT_EQ(refusal(file_of("{}      ", 0)), "accepted");
}

TEST_F(SafetensorsHeaderTest, FieldsHaveTheirTypes) {
  EXPECT_EQ(refusal(file_of(R"({"w":1})", 0)), "m.safetensors@0x8: tensor 'w': expected an object, got an integer");
  EXPECT_EQ(refusal(one(R"("shape":[],"data_offsets":[0,1])", 1)),
            "m.safetensors@0x8: tensor 'w': dtype: expected a string, got nothing");
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":1,"data_offsets":[0,1])", 1)),
            "m.safetensors@0x8: tensor 'w': shape: expected an array, got an integer");
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[1.0],"data_offsets":[0,1])", 1)),
            "m.safetensors@0x8: tensor 'w': shape: expected an integer, got a fraction");
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[1],"data_offsets":[0])", 1)),
            "m.safetensors@0x8: tensor 'w': data_offsets: expected 2 numbers, got 1");
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[1],"data_offsets":[0,"1"])", 1)),
            "m.safetensors@0x8: tensor 'w': data_offsets: expected an integer, got a string");
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[1],"data_offsets":[0,1],"scale":2)", 1)),
            "m.safetensors@0x8: tensor 'w': unknown field 'scale'");
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1])", 1)),
            "m.safetensors@0x8: tensor 'w': shape: expected at most 8 dimensions, got 9");
  EXPECT_EQ(code_, ErrorCode::kUnsupported);
  EXPECT_EQ(refusal(one(R"("dtype":"U8","shape":[1,1,1,1,1,1,1,1],"data_offsets":[0,1])", 1)), "accepted");
}

TEST_F(SafetensorsHeaderTest, MetadataAreStrings) {
  const auto header = read(file_of(R"({"__metadata__":{"b":"1","a":""}})", 0));
  ASSERT_TRUE(header);
  EXPECT_EQ(header->metadata, (SafetensorsMetadata{{"b", "1"}, {"a", ""}}));
  EXPECT_EQ(refusal(file_of(R"({"__metadata__":{"a":1}})", 0)),
            "m.safetensors@0x8: __metadata__: a: expected a string, got an integer");
  EXPECT_EQ(refusal(file_of(R"({"__metadata__":[]})", 0)),
            "m.safetensors@0x8: __metadata__: expected an object, got an array");
}

TEST_F(SafetensorsHeaderTest, HostileNamesArePrintedHarmlessly) {
  EXPECT_EQ(refusal(file_of(R"({"\u001b[2J":1})", 0)),
            "m.safetensors@0x8: tensor '\\x1b[2J': expected an object, got an integer");
}

TEST_F(SafetensorsHeaderTest, IsFoundInsideAnotherFile) {
  const std::string blob = one(R"("dtype":"U8","shape":[4],"data_offsets":[0,4])", 4);
  const std::string path = dir_.write("items", "front" + blob + "and more");
  const auto file = File::open(path);
  const auto length = static_cast<Index>(blob.size());
  const auto header = read_safetensors_header(*file, 5, length + 8, SafetensorsEnd::kWithin);
  ASSERT_TRUE(header) << header.error().message();
  EXPECT_EQ(header->data_start, 5 + length - 4);
  EXPECT_EQ(header->end, 5 + length);
  EXPECT_EQ(header->entries[0].offset, 5 + length - 4);
  EXPECT_FALSE(read_safetensors_header(*file, 5, length + 8, SafetensorsEnd::kExact));
  EXPECT_TRUE(read_safetensors_header(*file, 5, length, SafetensorsEnd::kExact));
  EXPECT_FALSE(read_safetensors_header(*file, 5, length - 1, SafetensorsEnd::kWithin));
  EXPECT_TRUE(read_safetensors_header(*file, 5, length - 4, SafetensorsEnd::kUnchecked));
  EXPECT_FALSE(read_safetensors_header(*file, 0, length, SafetensorsEnd::kWithin));
}

TEST_F(SafetensorsHeaderTest, EveryTruncationIsRefused) {
  const std::string bytes = file_of(R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F16","shape":[2],)"
                                    R"("data_offsets":[0,4]},"b":{"dtype":"U8","shape":[],"data_offsets":[4,5]}} )",
                                    5);
  ASSERT_EQ(refusal(bytes), "accepted");
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_NE(refusal(bytes.substr(0, n)), "accepted") << n;
    EXPECT_EQ(code_, ErrorCode::kCorrupt);
  }
}

TEST_F(SafetensorsHeaderTest, NoFlippedByteOfTheHeaderGoesPastTheRules) {
  const std::string bytes = one(R"("dtype":"U8","shape":[2,3],"data_offsets":[0,6])", 6);
  for (std::size_t i = 0; i < bytes.size() - 6; ++i)
    for (const int bit : {0, 3, 6}) {
      std::string flipped = bytes;
      flipped[i] = static_cast<char>(flipped[i] ^ (1 << bit));
      const auto header = read(flipped);
      if (!header) continue;  // an accepted header describes exactly these bytes
      EXPECT_EQ(header->end, static_cast<Index>(bytes.size()));
      for (const SafetensorsEntry& entry : header->entries)
        EXPECT_EQ(entry.length, volume(entry.shape) * byte_size(entry.dtype));
    }
}

// ---- Writing

TEST_F(SafetensorsHeaderTest, WhatIsWrittenReadsBack) {
  std::vector<SafetensorsEntry> entries;
  for (int d = 0; d <= static_cast<int>(DType::kComplex128); ++d) {
    const auto dtype = static_cast<DType>(d);
    if (info(dtype).safetensors_name.empty()) continue;
    entries.push_back({.name = "\"" + std::to_string(d) + "\n\xc3\xa9", .dtype = dtype, .shape = {d, 2}});
    entries.push_back({.name = "s" + std::to_string(d), .dtype = dtype, .shape = {}});
  }
  const SafetensorsMetadata metadata = {{"format", "pt"}, {"\"", "\\"}};
  for (const Index align : {8, 64, 4096}) {
    const auto text = safetensors_header(entries, metadata, align);
    ASSERT_TRUE(text) << text.error().message();
    EXPECT_EQ(static_cast<Index>(text->size()) % align, 0);
    const Index data = entries.back().offset + entries.back().length - static_cast<Index>(text->size());
    const auto header = read(*text + std::string(static_cast<std::size_t>(data), 'x'));
    ASSERT_TRUE(header) << header.error().message();
    EXPECT_EQ(header->metadata, metadata);
    EXPECT_EQ(header->data_start, static_cast<Index>(text->size()));
    ASSERT_EQ(header->entries.size(), entries.size());
    for (std::size_t i = 0; i < entries.size(); ++i) {
      EXPECT_EQ(header->entries[i].name, entries[i].name);
      EXPECT_EQ(header->entries[i].dtype, entries[i].dtype);
      EXPECT_EQ(header->entries[i].shape, entries[i].shape);
      EXPECT_EQ(header->entries[i].offset, entries[i].offset);
      EXPECT_EQ(header->entries[i].length, entries[i].length);
    }
  }
}

TEST_F(SafetensorsHeaderTest, WritesTheBytesOneWouldExpect) {
  std::vector<SafetensorsEntry> entries = {{.name = "w", .dtype = DType::kBFloat16, .shape = {2, 3}}};
  EXPECT_EQ(*safetensors_header(entries, {{"format", "pt"}}, 8),
            u64(96) + R"({"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}})" +
                std::string(7, ' '));
}

TEST_F(SafetensorsHeaderTest, RefusesToWriteWhatTheFormatCannotSay) {
  const auto message = [](SafetensorsEntry entry) {
    std::vector<SafetensorsEntry> entries = {std::move(entry)};
    const auto text = safetensors_header(entries, {});
    return text ? "accepted" : text.error().message();
  };
  EXPECT_EQ(message({.name = "w", .dtype = DType::kComplex128, .shape = {1}}),
            "tensor 'w': safetensors has no element type complex128");
  EXPECT_EQ(message({.name = "w", .dtype = DType::kComplex32, .shape = {1}}),
            "tensor 'w': safetensors has no element type complex32");
  EXPECT_EQ(message({.name = "w\xff", .dtype = DType::kBool, .shape = {1}}), "tensor 'w\\xff': the name is not UTF-8");
  EXPECT_EQ(message({.name = "__metadata__", .dtype = DType::kBool, .shape = {1}}),
            "tensor '__metadata__': safetensors reserves the name");
  EXPECT_EQ(message({.name = "w", .dtype = DType::kFloat64, .shape = {INT64_MAX}}),
            "tensor 'w': shape: the size of [9223372036854775807] is 2^63 bytes or more");
}

}  // namespace
}  // namespace reshard::safetensors_header_test
