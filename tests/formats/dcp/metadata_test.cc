// Tests parsing of DCP's `.metadata`, with pickles built by hand.
#include "formats/dcp/metadata.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/formats/dcp/metadata_cases.h"

namespace reshard::metadata_test {
namespace {

using namespace metadata_cases;
using testing::ElementsAre;
using testing::IsEmpty;

TEST_F(DcpMetadataTest, ReadsWhatIsMadeByHand) {
  const Catalog& c = catalog_of({});
  EXPECT_THAT(tensors_of(c), ElementsAre("w float32 [2, 3]"));
  EXPECT_THAT(shown(c, c.tensors()[0].fragments), ElementsAre("[0:1, 0:3] in __0_0.distcp at 0, 600 bytes",
                                                              "[1:2, 0:3] in __0_0.distcp at 600, 600 bytes"));
  EXPECT_THAT(blobs_of(c), ElementsAre("step in __0_0.distcp at 1200, 359 bytes"));
  EXPECT_THAT(files_of(c), ElementsAre("__0_0.distcp"));
  EXPECT_EQ(attribute(c, "torch"), "2.3 or later, or another writer");
}

TEST_F(DcpMetadataTest, KnowsEveryTypeOfElement) {
  for (int i = 0; i <= static_cast<int>(DType::kComplex128); ++i) {
    const auto type = static_cast<DType>(i);
    const Catalog& c = catalog_of({.properties = properties(dtype(std::string(info(type).torch_name)))});
    EXPECT_EQ(c.tensors()[0].dtype, type);
  }
}

// TensorProperties.__getstate__ (torch/distributed/checkpoint/metadata.py) is a tuple of five. Before torch 2.3 it is
// an object of _shard.sharded_tensor.metadata with fields by name, or a tuple. Only the first element of it counts.
TEST_F(DcpMetadataTest, ReadsPropertiesOfAllVersions) {
  const std::string old = "torch.distributed._shard.sharded_tensor.metadata";
  const Value type = dtype("bfloat16");
  const Value states[] = {
      tuple({type, layout(), boolean(false), memory_format(), boolean(false)}),
      tuple({type, layout(), boolean(false), memory_format(), boolean(false), integer(7)}),
      tuple({type}),
      fields_of({{"layout", layout()}, {"dtype", type}, {"requires_grad", boolean(true)}}),
      // Sparse layouts and gradients do not affect the stored bytes of a dense chunk.
      tuple({type, layout("torch.sparse_coo"), boolean(true), memory_format(), boolean(true)}),
  };
  for (const Value& state : states) {
    for (const auto& [module, torch] :
         std::map<std::string, std::string>{{kMetadata, "2.3 or later, or another writer"}, {old, "2.0 to 2.2"}}) {
      const Catalog& c = catalog_of({.properties = object(global(module, "TensorProperties"), state)});
      ASSERT_EQ(c.tensors().size(), 1u);
      EXPECT_EQ(c.tensors()[0].dtype, DType::kBFloat16);
      EXPECT_EQ(attribute(c, "torch"), torch);
    }
  }
}

TEST_F(DcpMetadataTest, RefusesPropertiesWithoutAType) {
  const auto refused = [&](Value state) {
    return refusal_of({.properties = object(global(kMetadata, "TensorProperties"), std::move(state))});
  };
  const std::string expected = "D/.metadata: 'w': D/.metadata: TensorProperties: expected a torch dtype, got ";
  EXPECT_THAT(refused(tuple({})), testing::StartsWith(expected + "an object torch.distributed.checkpoint.metadata"));
  EXPECT_THAT(refused(tuple({text("float32")})), testing::StartsWith(expected));
  EXPECT_THAT(refused(tuple({global("numpy.core", "float32")})), testing::StartsWith(expected));
  EXPECT_THAT(refused(fields_of({{"type", dtype()}})), testing::StartsWith(expected));
  EXPECT_THAT(refused(list({dtype()})), testing::StartsWith(expected));
  EXPECT_EQ(code_, ErrorCode::kCorrupt);
  EXPECT_EQ(refused(tuple({dtype("quint8")})), "D/.metadata: 'w': dtype torch.quint8 is not supported");
  EXPECT_EQ(code_, ErrorCode::kUnsupported);
}

// The classes were under _shard until torch 2.0.
TEST_F(DcpMetadataTest, KnowsTheClassesUnderTheirOldName) {
  const std::string old = "torch.distributed._shard.checkpoint.";
  Parts parts{.chunks = list({of_class("ChunkStorageMetadata", {{"offsets", size({0, 0})}, {"sizes", size({2, 3})}},
                                       old + "metadata")}),
              .module = old + "metadata"};
  const auto index = [&](const Fields& fields) { return of_class("MetadataIndex", fields, old + "metadata"); };
  const auto stored = [&](Index offset, Index length) {
    return of_class("_StorageInfo",
                    {{"relative_path", text("__0_0.distcp")}, {"offset", integer(offset)}, {"length", integer(length)}},
                    old + "filesystem");
  };
  parts.storage = {{index({{"fqn", text("w")}, {"offset", size({0, 0})}, {"index", none()}}), stored(0, 700)},
                   {index({{"fqn", text("step")}, {"offset", none()}, {"index", none()}}), stored(700, 300)}};
  const Catalog& c = catalog_of(parts);
  EXPECT_THAT(shown(c, c.tensors()[0].fragments), ElementsAre("[0:2, 0:3] in __0_0.distcp at 0, 700 bytes"));
  EXPECT_THAT(blobs_of(c), ElementsAre("step in __0_0.distcp at 700, 300 bytes"));
}

TEST_F(DcpMetadataTest, TellsTheVersionOfTorchByTheFieldsItAdded) {
  const auto torch = [&](Fields more) {
    Parts parts;
    parts.fields.insert(parts.fields.end(), more.begin(), more.end());
    return attribute(catalog_of(parts), "torch");
  };
  const Value meta = of_class("StorageMeta", {{"checkpoint_id", text("ck")}, {"save_id", text("x")}});
  const Value with_modules = of_class("StorageMeta", {{"checkpoint_id", text("ck")}, {"modules", list({})}});
  EXPECT_EQ(torch({}), "2.3 or later, or another writer");
  EXPECT_EQ(torch({{"storage_meta", none()}}), "2.3 or later, or another writer");
  EXPECT_EQ(torch({{"storage_meta", meta}}), "2.4 or later");
  EXPECT_EQ(torch({{"storage_meta", with_modules}}), "2.7 or later");
  EXPECT_EQ(torch({{"storage_meta", meta}, {"version", text("1.0.0")}}), "2.9 or later");
  EXPECT_EQ(torch({{"storage_meta", meta}, {"what_comes_next", dict({})}}),
            "2.4 or later");  // an unknown key is ignored
}

// Items that went through an extension (torch 2.7, _extension.py) name it; zstd is the only one.
TEST_F(DcpMetadataTest, KnowsItemsThatAreCompressed) {
  const auto with = [](Value transforms) {
    Parts parts;
    parts.storage[2].second = of_class("_StorageInfo",
                                       {{"relative_path", text("__0_0.distcp")},
                                        {"offset", integer(1200)},
                                        {"length", integer(359)},
                                        {"transform_descriptors", std::move(transforms)}},
                                       kFilesystem);
    return parts;
  };
  EXPECT_EQ(attribute(catalog_of(with(list({text("stream.zstd/1")}))), "torch"), "2.7 or later");
  EXPECT_EQ(attribute(catalog_of(with(list({}))), "torch"), "2.3 or later, or another writer");
  EXPECT_EQ(attribute(catalog_of(with(none())), "torch"), "2.3 or later, or another writer");
  EXPECT_EQ(refusal_of(with(list({text("stream.lz4/1")}))),
            "D/.metadata: 'step' is stored through the transform ['stream.lz4/1']; only stream.zstd/1 is supported");
  EXPECT_EQ(code_, ErrorCode::kUnsupported);
  EXPECT_EQ(
      refusal_of(with(list({text("stream.zstd/1"), text("stream.zstd/1")}))),
      "D/.metadata: 'step' is stored through the transform ['stream.zstd/1', 'stream.zstd/1']; only stream.zstd/1 "
      "is supported");
}

TEST_F(DcpMetadataTest, RefusesWhatIsNoMetadata) {
  write(bytes_of(dict({})));
  EXPECT_EQ(refusal(), "D/.metadata: root: expected torch.distributed.checkpoint's Metadata, got a dict of 0");
  write(bytes_of(of_class("StorageMeta", {})));
  EXPECT_THAT(refusal(),
              testing::StartsWith("D/.metadata: root: expected torch.distributed.checkpoint's Metadata, got "));
  write(bytes_of(object(global(kMetadata, "Metadata"), tuple({}))));
  EXPECT_EQ(refusal(), "D/.metadata: Metadata: expected a dict of fields, got a tuple of 0");
  write(bytes_of(of_class("Metadata", {})));
  EXPECT_EQ(refusal(), "D/.metadata: Metadata: expected a field 'state_dict_metadata', got a dict of 0");
  write(bytes_of(of_class("Metadata", {{"state_dict_metadata", dict({})}})));
  EXPECT_EQ(refusal(), "D/.metadata: Metadata: expected a field 'storage_data', got a dict of 1");
  EXPECT_EQ(refusal_of({.entries = list({})}), "D/.metadata: state_dict_metadata: expected a dict, got a list of 0");
  EXPECT_EQ(refusal_of({.storage_data = none()}), "D/.metadata: storage_data: expected a dict, got None");
  EXPECT_EQ(code_, ErrorCode::kCorrupt);
}

TEST_F(DcpMetadataTest, AnEmptyStateIsACheckpointOfNothing) {
  const Catalog& c = catalog_of({.entries = dict({}), .storage = {}, .fields = {}});
  EXPECT_THAT(c.tensors(), IsEmpty());
  EXPECT_THAT(c.blobs, IsEmpty());
}

// A name from another package means that the pickle was written to be executed.
TEST_F(DcpMetadataTest, RefusesGlobalsOfOtherPackages) {
  const auto refused = [&](Value value) { return refusal_of({.fields = {{"storage_meta", std::move(value)}}}); };
  EXPECT_EQ(
      refused(call(global("os", "system"), {text("true")})),
      "D/.metadata: the pickle names 'os.system', which no checkpoint needs; refused (nothing in it was executed)");
  EXPECT_EQ(code_, ErrorCode::kCorrupt);
  EXPECT_THAT(refused(global("builtins", "eval")), testing::HasSubstr("names 'builtins.eval', which no"));
  EXPECT_THAT(refused(global("torchx.evil", "f")), testing::HasSubstr("names 'torchx.evil.f', which no"));
  for (const auto& [module, name] :
       std::vector<std::pair<std::string, std::string>>{{"pathlib", "PosixPath"},
                                                        {"pathlib._local", "PosixPath"},
                                                        {"collections", "OrderedDict"},
                                                        {"builtins", "set"},
                                                        {"builtins", "getattr"},
                                                        {"megatron.core.dist_checkpointing.mapping", "ShardedObject"}})
    EXPECT_EQ(refused(global(module, name)), "accepted") << module << name;
}

TEST_F(DcpMetadataTest, TellsPythonByWhatItPickles) {
  const auto python = [&](Value checkpoint_id, char protocol = 2) {
    Parts parts;
    parts.fields.emplace_back("storage_meta", of_class("StorageMeta", {{"checkpoint_id", std::move(checkpoint_id)}}));
    std::string bytes = parts.bytes();
    bytes[1] = protocol;
    write(bytes);
    return attribute(catalog(), "python");
  };
  EXPECT_EQ(python(call(global("pathlib._local", "PosixPath"), {text("ck")}), 4), "3.13");
  EXPECT_EQ(python(call(global("pathlib", "PosixPath"), {text("ck")}), 4), "3.8 to 3.12");
  EXPECT_EQ(python(call(global("pathlib", "PosixPath"), {text("ck")}), 5), "3.14 or later");
  EXPECT_EQ(python(global("builtins", "getattr"), 4), "3.11.0 to 3.11.3");
  EXPECT_EQ(python(none(), 2), "");
}

TEST_F(DcpMetadataTest, RefusesEntriesOfOtherKinds) {
  const auto refused = [&](Value entry) { return refusal_of({.entries = dict({{text("x"), std::move(entry)}})}); };
  const std::string expected =
      "D/.metadata: 'x': D/.metadata: state_dict_metadata: expected TensorStorageMetadata or BytesStorageMetadata, "
      "got ";
  EXPECT_EQ(refused(none()), expected + "None");
  EXPECT_EQ(refused(dict({})), expected + "a dict of 0");
  EXPECT_THAT(refused(of_class("ChunkStorageMetadata", {})), testing::StartsWith(expected + "an object "));
  EXPECT_THAT(refused(global(kMetadata, "TensorStorageMetadata")), testing::StartsWith(expected));
  // A class of that name in another module is another class.
  EXPECT_THAT(refused(object(global("torch.other", "BytesStorageMetadata"))), testing::StartsWith(expected));
  EXPECT_EQ(refusal_of({.entries = dict({{integer(3), bytes_entry()}})}),
            "D/.metadata: state_dict_metadata: expected a string as key, got an int 3");
}

TEST_F(DcpMetadataTest, RefusesTensorsWithMissingFields) {
  const auto refused = [&](const Fields& fields) {
    return refusal_of({.tensor = of_class("TensorStorageMetadata", fields)});
  };
  const auto says = [](const std::string& name, int got) {
    return "D/.metadata: 'w': D/.metadata: TensorStorageMetadata: expected a field '" + name + "', got a dict of " +
           std::to_string(got);
  };
  EXPECT_EQ(refused({{"size", size({2})}, {"chunks", list({})}}), says("properties", 2));
  EXPECT_EQ(refused({{"properties", properties()}, {"chunks", list({})}}), says("size", 2));
  EXPECT_EQ(refused({{"properties", properties()}, {"size", size({2})}}), says("chunks", 2));
  EXPECT_EQ(refusal_of({.tensor = object(global(kMetadata, "TensorStorageMetadata"))}),
            "D/.metadata: 'w': D/.metadata: TensorStorageMetadata: expected a field 'properties', got None");
  EXPECT_EQ(refusal_of({.chunks = none()}),
            "D/.metadata: 'w': no list of chunks: the metadata is older than torch 2.0");
  EXPECT_EQ(code_, ErrorCode::kUnsupported);
}

TEST_F(DcpMetadataTest, FieldsThatAreNotKnownChangeNothing) {
  const Catalog& c = catalog_of(
      {.tensor = of_class("TensorStorageMetadata", {{"future", list({integer(1)})},
                                                    {"properties", properties()},
                                                    {"size", size({2, 3})},
                                                    {"chunks", list({chunk({0, 0}, {1, 3}), chunk({1, 0}, {1, 3})})},
                                                    {"other", none()}})});
  EXPECT_THAT(tensors_of(c), ElementsAre("w float32 [2, 3]"));
}

TEST_F(DcpMetadataTest, RefusesSizesThatAreNone) {
  const auto refused = [&](Value v) { return refusal_of({.size = std::move(v)}); };
  const std::string at = "D/.metadata: 'w': D/.metadata: size: expected ";
  EXPECT_EQ(refused(integer(6)), at + "a tuple of integers, got an int 6");
  EXPECT_EQ(refused(none()), at + "a tuple of integers, got None");
  EXPECT_EQ(refused(size({2, -3})), at + "integers of 0 or more, got a tuple of 2");
  EXPECT_EQ(refused(tuple({integer(2), text("3")})), at + "integers of 0 or more, got a tuple of 2");
  EXPECT_EQ(refused(tuple({integer(2), number(3)})), at + "integers of 0 or more, got a tuple of 2");
  EXPECT_EQ(refused(integers({1, 1, 1, 1, 1, 1, 1, 1, 1})), at + "at most 8 dimensions, got a tuple of 9");
  EXPECT_EQ(code_, ErrorCode::kCorrupt);
}

TEST_F(DcpMetadataTest, RefusesSizesWhoseBytesCannotBeCounted) {
  EXPECT_EQ(refusal_of({.size = size({Index{1} << 40, Index{1} << 40})}),
            "D/.metadata: 'w': size [1099511627776, 1099511627776] overflows");
  EXPECT_EQ(refusal_of({.size = size({Index{1} << 61})}), "D/.metadata: 'w': size [2305843009213693952] overflows");
  EXPECT_EQ(refusal_of({.size = size({INT64_MAX, 2, 0})}).substr(0, 22), "D/.metadata: 'w': size");
  const Value huge = [](pickle::PickleWriter& w) {  // 2^64, which does not fit any 64-bit integer
    w.mark();
    w.big_integer(std::string_view("\0\0\0\0\0\0\0\0\1", 9));
    w.tuple_from_mark();
  };
  EXPECT_EQ(refusal_of({.size = huge}),
            "D/.metadata: 'w': D/.metadata: size: expected integers of 0 or more, got a tuple of 1");
  // Any size that fits the integers is accepted.
  const Index rows = (Index{1} << 61) - 1;
  const Catalog& c = catalog_of({.size = size({rows}),
                                 .chunks = list({chunk({0}, {rows})}),
                                 .storage = {{item_of("w", {0}, 0), place("__0_0.distcp", 0, INT64_MAX)},
                                             {item_of("step"), place("__1_0.distcp", 0, 1)}}});
  EXPECT_THAT(tensors_of(c), ElementsAre("w float32 [2305843009213693951]"));
}

TEST_F(DcpMetadataTest, SizesMayBeListsAndTuples) {
  for (const Value& v : {integers({2, 3}), list({integer(2), integer(3)})})
    EXPECT_THAT(tensors_of(catalog_of({.size = v})), ElementsAre("w float32 [2, 3]"));
}

TEST_F(DcpMetadataTest, RefusesChunksThatAreNone) {
  const auto refused = [&](Values chunks) { return refusal_of({.chunks = list(std::move(chunks))}); };
  EXPECT_EQ(refused({none()}), "D/.metadata: 'w': D/.metadata: chunks: expected ChunkStorageMetadata, got None");
  EXPECT_EQ(refused({object(global(kMetadata, "ChunkStorageMetadata"))}),
            "D/.metadata: 'w': D/.metadata: ChunkStorageMetadata: expected a dict of fields, got None");
  EXPECT_EQ(refused({of_class("ChunkStorageMetadata", {{"sizes", size({1, 3})}})}),
            "D/.metadata: 'w': D/.metadata: ChunkStorageMetadata: expected a field 'offsets', got a dict of 1");
  EXPECT_EQ(refused({of_class("ChunkStorageMetadata", {{"offsets", size({0, 0})}})}),
            "D/.metadata: 'w': D/.metadata: ChunkStorageMetadata: expected a field 'sizes', got a dict of 1");
  EXPECT_EQ(refused({chunk({-1, 0}, {1, 3})}),
            "D/.metadata: 'w': D/.metadata: offsets: expected integers of 0 or more, got a tuple of 2");
  EXPECT_EQ(refused({chunk({0, 0}, {1, -3})}),
            "D/.metadata: 'w': D/.metadata: sizes: expected integers of 0 or more, got a tuple of 2");
  const auto outside = [](const std::string& which, const std::string& at, const std::string& of_size) {
    return "D/.metadata: 'w': chunk " + which + " at " + at + " of size " + of_size +
           " is outside the tensor's size [2, 3]";
  };
  EXPECT_EQ(refused({chunk({0, 0}, {1, 3}), chunk({1, 0}, {2, 3})}), outside("1", "[1, 0]", "[2, 3]"));
  EXPECT_EQ(refused({chunk({0}, {2})}), outside("0", "[0]", "[2]"));
  EXPECT_EQ(refused({chunk({0, 0}, {2})}), outside("0", "[0, 0]", "[2]"));
  EXPECT_EQ(refused({chunk({INT64_MAX, 0}, {INT64_MAX, 3})}),
            outside("0", "[9223372036854775807, 0]", "[9223372036854775807, 3]"));
}

// Every chunk names its class. A known class of one must not let another one pass.
TEST_F(DcpMetadataTest, LooksAtTheClassOfEveryChunk) {
  EXPECT_THAT(
      refusal_of({.chunks = list({chunk({0, 0}, {1, 3}),
                                  of_class("MetadataIndex", {{"offsets", size({1, 0})}, {"sizes", size({1, 3})}})})}),
      testing::StartsWith("D/.metadata: 'w': D/.metadata: chunks: expected ChunkStorageMetadata, got an object"));
}

// Fields are found by name, even if their order differs between objects.
TEST_F(DcpMetadataTest, FindsFieldsInAnyOrder) {
  const Value other =
      of_class("ChunkStorageMetadata", {{"sizes", size({1, 3})}, {"offsets", size({1, 0})}, {"extra", integer(1)}});
  Parts parts{.chunks = list({chunk({0, 0}, {1, 3}), other})};
  parts.storage[1] = {
      of_class("MetadataIndex", {{"offset", size({1, 0})}, {"fqn", text("w")}, {"index", integer(1)}}),
      of_class("_StorageInfo",
               {{"length", integer(600)}, {"offset", integer(600)}, {"relative_path", text("__0_0.distcp")}},
               kFilesystem)};
  const Catalog& c = catalog_of(parts);
  EXPECT_THAT(shown(c, c.tensors()[0].fragments), ElementsAre("[0:1, 0:3] in __0_0.distcp at 0, 600 bytes",
                                                              "[1:2, 0:3] in __0_0.distcp at 600, 600 bytes"));
}

TEST_F(DcpMetadataTest, OfAFieldThatIsThereTwiceTheLastCounts) {
  Parts parts;
  parts.storage[2].second = of_class("_StorageInfo",
                                     {{"relative_path", text("../evil")},
                                      {"offset", integer(-1)},
                                      {"length", integer(359)},
                                      {"relative_path", text("__0_0.distcp")},
                                      {"offset", integer(1200)}},
                                     kFilesystem);
  EXPECT_THAT(blobs_of(catalog_of(parts)), ElementsAre("step in __0_0.distcp at 1200, 359 bytes"));
}

TEST_F(DcpMetadataTest, RefusesATensorThatIsAnObjectToo) {
  EXPECT_EQ(refusal_of({.more_entries = {{text("w"), bytes_entry()}}}), "D/.metadata: 'w': is a tensor and an object");
  EXPECT_EQ(refusal_of({.more_entries = {{text("step"), tensor_entry({1}, {chunk({0}, {1})})}}}),
            "D/.metadata: 'step': is a tensor and an object");
}

TEST_F(DcpMetadataTest, RefusesATensorThatIsThereTwice) {
  EXPECT_EQ(refusal_of({.more_entries = {{text("w"), tensor_entry({2, 3}, {chunk({0, 0}, {2, 3})})}}}),
            "D/.metadata: tensor 'w' [0:2, 0:3]: storage_data has no entry for it");
  EXPECT_EQ(refusal_of({.more_entries = {{text("w"), tensor_entry({3, 2}, {chunk({0, 0}, {3, 2})})}}}),
            "D/.metadata: 'w': expected [2, 3] as in the other ranks' metadata, got [3, 2]");
}

TEST_F(DcpMetadataTest, RefusesStorageThatIsNone) {
  const auto refused = [&](Value key, Value info) {
    return refusal_of({.storage = {{std::move(key), std::move(info)}}});
  };
  const Value good = place("__0_0.distcp", 0, 600);
  EXPECT_EQ(refused(text("w"), good), "D/.metadata: storage_data: expected a MetadataIndex as key, got a string 'w'");
  EXPECT_EQ(refused(item_of("w", {0, 0}, 0), none()), "D/.metadata: storage_data: expected _StorageInfo, got None");
  EXPECT_EQ(refused(of_class("MetadataIndex", {{"index", none()}}), good),
            "D/.metadata: MetadataIndex: expected a field 'fqn', got a dict of 1");
  EXPECT_EQ(refused(of_class("MetadataIndex", {{"fqn", integer(1)}}), good),
            "D/.metadata: MetadataIndex.fqn: expected a string, got an int 1");
  EXPECT_EQ(refused(of_class("MetadataIndex", {{"fqn", text("w")}, {"offset", text("0")}}), good),
            "D/.metadata: MetadataIndex.offset: expected a tuple of integers, got a string '0'");
  EXPECT_EQ(refused(object(global(kMetadata, "MetadataIndex"), tuple({text("w")})), good),
            "D/.metadata: MetadataIndex: expected a dict of fields, got a tuple of 1");
  EXPECT_EQ(code_, ErrorCode::kCorrupt);
}

TEST_F(DcpMetadataTest, RefusesPlacesThatAreNone) {
  const auto refused = [&](const Fields& fields) {
    Parts parts;
    parts.storage[0].second = of_class("_StorageInfo", fields, kFilesystem);
    return refusal_of(parts);
  };
  const auto lacks = [](const std::string& name) {
    return "D/.metadata: _StorageInfo: expected a field '" + name + "', got a dict of 2";
  };
  const Value path = text("__0_0.distcp"), zero = integer(0), one = integer(1);
  EXPECT_EQ(refused({{"offset", zero}, {"length", one}}), lacks("relative_path"));
  EXPECT_EQ(refused({{"relative_path", path}, {"length", one}}), lacks("offset"));
  EXPECT_EQ(refused({{"relative_path", path}, {"offset", zero}}), lacks("length"));
  const std::string expected =
      "D/.metadata: _StorageInfo of 'w': expected a path, an offset and a length, got an object "
      "torch.distributed.checkpoint.filesystem._StorageInfo().state({...})";
  const auto full = [](Value p, Value o, Value l) {
    return Fields{{"relative_path", p}, {"offset", o}, {"length", l}};
  };
  EXPECT_EQ(refused(full(none(), zero, one)), expected);
  EXPECT_EQ(refused(full(path, text("0"), one)), expected);
  EXPECT_EQ(refused(full(path, zero, number(1))), expected);
  EXPECT_EQ(refused(full(path, integer(-1), one)), expected);
  EXPECT_EQ(refused(full(path, zero, integer(-1))), expected);
  EXPECT_EQ(refused(full(path, integer(INT64_MAX), one)), expected);
}

TEST_F(DcpMetadataTest, RefusesFilesOutsideTheDirectory) {
  for (const std::string path : {"../x.distcp", "/etc/passwd", "a/../../x", "./x", "a//b", "", "a\\b", "x/", ".."}) {
    Parts parts;
    parts.storage[0].second = place(path, 0, 600);
    EXPECT_EQ(refusal_of(parts), "D/.metadata: relative_path '" + path + "' leaves the checkpoint's directory");
  }
  Parts parts;
  parts.storage[0].second = place(std::string("a\0b", 3), 0, 600);
  EXPECT_EQ(refusal_of(parts), "D/.metadata: relative_path 'a\\x00b' leaves the checkpoint's directory");
  parts.storage[0].second = place("deep/down/x.distcp", 0, 600);
  EXPECT_THAT(files_of(catalog_of(parts)), ElementsAre("deep/down/x.distcp", "__0_0.distcp"));
}

TEST_F(DcpMetadataTest, RefusesItemsOfNoChunk) {
  const auto refused = [&](Value item) {
    Parts parts;
    parts.storage.emplace_back(std::move(item), place("__1_0.distcp", 0, 600));
    return refusal_of(parts);
  };
  const std::string none_at = "D/.metadata: storage_data has a chunk of 'w' at ";
  EXPECT_EQ(refused(item_of("w", {0, 1}, 0)), none_at + "[0, 1] that is not one of its chunks, or is listed twice");
  EXPECT_EQ(refused(item_of("w", {1, 0}, 0)), none_at + "[1, 0] that is not one of its chunks, or is listed twice");
  EXPECT_EQ(refused(item_of("w", {0}, 0)), none_at + "[0] that is not one of its chunks, or is listed twice");
  EXPECT_EQ(refused(item_of("unknown", {0}, 0)),
            "D/.metadata: storage_data contains a chunk of 'unknown', but state_dict_metadata does not");
}

TEST_F(DcpMetadataTest, RefusesWhatIsStoredNowhere) {
  Parts parts;
  parts.storage.erase(parts.storage.begin() + 1);
  EXPECT_EQ(refusal_of(parts), "D/.metadata: tensor 'w' [1:2, 0:3]: storage_data has no entry for it");
  parts = {};
  parts.storage.pop_back();
  EXPECT_EQ(refusal_of(parts), "D/.metadata: object 'step': storage_data has no entry for it");
}

TEST_F(DcpMetadataTest, WarnsOfAnObjectThatOnlyStorageHas) {
  Parts parts;
  parts.storage.emplace_back(item_of("left_over"), place("__0_0.distcp", 2000, 100));
  EXPECT_THAT(catalog_of(parts).warnings,
              ElementsAre("storage_data contains 'left_over', but state_dict_metadata does not"));
}

// MetadataIndex.index is a hint that torch itself does not rely on (metadata.py): it may be wrong or missing.
TEST_F(DcpMetadataTest, TheOffsetCountsWhateverTheIndexSays) {
  for (const Value& index : {integer(0), integer(7), integer(-1), integer(INT64_MAX), none(), text("1")}) {
    Parts parts;
    parts.storage[1].first =
        of_class("MetadataIndex", {{"fqn", text("w")}, {"index", index}, {"offset", size({1, 0})}});
    const Catalog& c = catalog_of(parts);
    ASSERT_EQ(c.tensors().size(), 1u);
    EXPECT_EQ(shown(c, c.tensors()[0].fragments.get(1)), "[1:2, 0:3] in __0_0.distcp at 600, 600 bytes");
  }
}

// Torch before 2.8 may give an empty shard the offset of a full one: the stored item is then the full one's.
TEST_F(DcpMetadataTest, AnItemBelongsToTheChunkThatHoldsData) {
  for (const Index hint : {0, 1}) {
    Parts parts{.chunks = list({chunk({0, 0}, {0, 3}), chunk({0, 0}, {2, 3})})};
    parts.storage = {{item_of("w", {0, 0}, hint), place("__0_0.distcp", 0, 700)}, parts.storage[2]};
    const Catalog& c = catalog_of(parts);
    ASSERT_EQ(c.tensors().size(), 1u);
    EXPECT_THAT(shown(c, c.tensors()[0].fragments), ElementsAre("[0:2, 0:3] in __0_0.distcp at 0, 700 bytes"));
  }
}

TEST_F(DcpMetadataTest, RefusesChunksThatOverlapOrLeaveAHole) {
  Parts parts{.chunks = list({chunk({0, 0}, {2, 3}), chunk({1, 0}, {1, 3})})};
  EXPECT_THAT(refusal_of(parts), testing::AllOf(testing::HasSubstr("'w'"), testing::HasSubstr("[1:2, 0:3]")));
  EXPECT_EQ(code_, ErrorCode::kCorrupt);
  EXPECT_EQ(catalog_of(parts, false).tensors()[0].fragments.size(), 2u);  // an audit sees it anyway
  parts = {.chunks = list({chunk({0, 0}, {1, 3})})};
  parts.storage.erase(parts.storage.begin() + 1);
  EXPECT_THAT(refusal_of(parts), testing::HasSubstr("'w'"));
  EXPECT_EQ(code_, ErrorCode::kCorrupt);
  EXPECT_EQ(catalog_of(parts, false).tensors()[0].fragments.size(), 1u);
  parts = {.chunks = list({}), .storage = {parts.storage.back()}};
  EXPECT_THAT(refusal_of(parts), testing::HasSubstr("'w'"));
}

TEST_F(DcpMetadataTest, ReadsKeyPathsOfNestedStates) {
  Parts parts;
  parts.fields[0].second = dict({{text("w"), tuple({text("a"), integer(3), text("")})},
                                 {text("step"), list({text("not a tuple")})},         // from a custom planner
                                 {integer(1), tuple({text("x")})},                    // likewise
                                 {text("nobody"), tuple({text("x"), integer(0)})}});  // of an entry that was not saved
  const Catalog& c = catalog_of(parts);
  EXPECT_EQ(shown(c.tensors()[0].path), "/a[3]/");
  EXPECT_THAT(c.blobs[0].path, IsEmpty());
  parts.fields[0].second = dict({{text("w"), tuple({text("a"), none()})}});
  EXPECT_EQ(refusal_of(parts),
            "D/.metadata: planner_data of 'w': expected a path of strings and integers, got a tuple of 2");
  for (const Value& other : {none(), list({}), text("mine")}) {
    parts.fields[0].second = other;
    EXPECT_THAT(catalog_of(parts).tensors()[0].path, IsEmpty());
  }
  parts.fields.clear();
  EXPECT_THAT(catalog_of(parts).tensors()[0].path, IsEmpty());
}

TEST_F(DcpMetadataTest, RefusesWhatIsNotAllThere) {
  const std::string whole = Parts().bytes();
  for (std::size_t n = 0; n < whole.size(); ++n) {
    write(whole.substr(0, n));
    EXPECT_THAT(refusal(), testing::StartsWith("D/.metadata@")) << n;
  }
  write(whole + "x");
  EXPECT_THAT(refusal(), testing::StartsWith("D/.metadata@"));
}

TEST_F(DcpMetadataTest, NamesAreMadeSafeForTerminals) {
  EXPECT_EQ(refusal_of({.entries = dict({{text("a\x1b[2J"), none()}})}),
            "D/.metadata: 'a\\x1b[2J': D/.metadata: state_dict_metadata: expected TensorStorageMetadata or "
            "BytesStorageMetadata, got None");
}

// ---- several files of metadata

TEST_F(DcpMetadataTest, SaysWhenThereIsNone) {
  dir_.write("__0_0.distcp", "x");
  EXPECT_EQ(
      refusal(),
      "D: .metadata is missing: the save did not finish, and without it the content of the .distcp files is unknown");
  EXPECT_EQ(code_, ErrorCode::kCorrupt);
}

TEST_F(DcpMetadataTest, WarnsOfPathsThatAreMissing) {
  const std::string warning =
      "Metadata has no planner_data, which torch always writes: the paths of names in the nested state_dict are "
      "unknown";
  EXPECT_THAT(catalog_of({.fields = {{"pl\nner_data", none()}}}).warnings, ElementsAre(warning));
  EXPECT_THAT(catalog_of({.fields = {{"planner_data", none()}}}).warnings, IsEmpty());
}

TEST_F(DcpMetadataTest, UsesMetadataThatWereNotRenamed) {
  write(Parts(), ".metadata.tmp");
  EXPECT_THAT(catalog().warnings,
              ElementsAre(".metadata is missing, but .metadata.tmp is complete: the save died just before its last "
                          "rename. It is used; renaming it to .metadata repairs the checkpoint."));
  write(bytes_of(none()));
  EXPECT_THAT(refusal(), testing::StartsWith("D/.metadata: root"));  // .metadata takes precedence
}

// Ranks that save on their own (torch 2.9, use_collectives=False) repeat replicated tensors; their boxes are joined.
TEST_F(DcpMetadataTest, JoinsTheMetadataOfRanks) {
  const auto of_rank = [](Index rank) {
    const std::string file = "__" + std::to_string(rank) + "_0.distcp";
    Parts parts{.chunks = list({chunk({rank, 0}, {1, 3})}),
                .more_entries = {{text("norm"), tensor_entry({4}, {chunk({0}, {4})})}}};
    parts.storage = {{item_of("w", {rank, 0}, 0), place(file, 0, 600)},
                     {item_of("norm", {0}, 0), place(file, 600, 600)},
                     {item_of("step"), place(file, 1200, 300)}};
    return parts;
  };
  write(of_rank(0), "__0.metadata");
  write(of_rank(1), "__1.metadata");
  dir_.write("__x.metadata", "none of ours");
  const Catalog& c = catalog();
  EXPECT_EQ(attribute(c, "format"), "PyTorch DCP, 2 ranks saved on their own");
  EXPECT_THAT(tensors_of(c), ElementsAre("norm float32 [4]", "w float32 [2, 3]"));
  EXPECT_THAT(shown(c, c.tensors()[0].fragments), ElementsAre("[0:4] in __0_0.distcp at 600, 600 bytes"));
  EXPECT_THAT(shown(c, c.tensors()[0].replicas), ElementsAre("[0:4] in __1_0.distcp at 600, 600 bytes"));
  EXPECT_THAT(shown(c, c.tensors()[1].fragments),
              ElementsAre("[0:1, 0:3] in __0_0.distcp at 0, 600 bytes", "[1:2, 0:3] in __1_0.distcp at 0, 600 bytes"));
  EXPECT_THAT(blobs_of(c), ElementsAre("step in __0_0.distcp at 1200, 300 bytes"));

  Parts other = of_rank(1);
  other.size = size({2, 4});
  write(other, "__1.metadata");
  EXPECT_EQ(refusal(), "D/__1.metadata: 'w': expected [2, 3] as in the other ranks' metadata, got [2, 4]");
  std::filesystem::remove(dir_ / "__1.metadata");
  EXPECT_THAT(refusal(), testing::HasSubstr("'w'"));  // only half of it is stored
}

}  // namespace
}  // namespace reshard::metadata_test
