#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/dcp/dcp.h"
#include "formats/dcp/metadata.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/dcp_metadata.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::metadata_size_test {
namespace {

using testing::HasSubstr;

TEST(DcpMetadataSize, WritesMillionsOfValuesWithoutDeepStacks) {
  const Index pieces = 600'000 / every_nth(6);
  const TargetTensor tensor{"w", DType::kFloat32, {pieces}, {"w"}, {}};
  dcp::WrittenEntry entry{&tensor, "w", {"w"}, {}};
  for (Index i = 0; i < pieces; ++i) entry.items.push_back({Box{{i}, {1}}, 0, i * 512, 512});
  const TempDir dir;
  write_file(dir / ".metadata", dcp::write_metadata({entry}, {"__0_0.distcp"}));
  const auto open = open_checkpoint(dir.path(), {.files_too = false});
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_EQ(open->reader->catalog().tensors()[0].fragments.size(), static_cast<std::size_t>(pieces));
}

// Returns the result of opening a directory with this `.metadata`.
std::string outcome(const std::string& metadata) {
  const TempDir dir;
  write_file(dir / ".metadata", metadata);
  const auto open = open_checkpoint(dir.path(), {.files_too = false});
  return open ? "opened" : open.error().message();
}

// 200 objects share one path of 64 parts of 100 kB, which would be 1.3 GB if all were copied.
TEST(DcpMetadataSize, RefusesPathsThatAreSharedTooOften) {
  const KeyPath path(64, std::string(100'000, 'x'));
  std::vector<dcp::WrittenEntry> entries;
  for (Index i = 0; i < 200; ++i) {
    dcp::WrittenItem item;
    item.offset = 100 * i;
    item.length = 100;
    entries.push_back({nullptr, std::to_string(i), path, {item}});
  }
  const std::string metadata = dcp::write_metadata(entries, {"__0_0.distcp"});
  EXPECT_LT(metadata.size(), 2'000'000U);
  EXPECT_THAT(outcome(metadata), HasSubstr("the same ones are used too often"));
}

// 10,000 tensors share one entry, and with it one list of 10,000 chunks.
TEST(DcpMetadataSize, RefusesChunksThatAreSharedTooOften) {
  pickle::PickleWriter w;
  const auto object = [&](std::string_view name, const auto& fields) {
    w.shared_global(dcp::kMetadataModule, name);
    w.empty_tuple();
    w.new_object();
    w.empty_dict();
    w.mark();
    fields();
    w.set_items();
    w.build();
  };
  const auto chunks = [&] {
    w.empty_list();
    w.mark();
    for (Index i = 0; i < 10'000; ++i)
      object("ChunkStorageMetadata", [&] {
        w.shared_text("offsets");
        w.integers(std::vector<Index>{i});
        w.shared_text("sizes");
        w.integers(std::vector<Index>{1});
      });
    w.append_items();
  };
  object("Metadata", [&] {
    w.shared_text("state_dict_metadata");
    w.empty_dict();
    w.mark();
    w.text("0");
    object("TensorStorageMetadata", [&] {
      w.shared_text("properties");
      w.shared_global(dcp::kMetadataModule, "TensorProperties");
      w.empty_tuple();
      w.new_object();
      w.shared_global("torch", "float32");
      w.tuple_of_last(1);
      w.build();
      w.shared_text("size");
      w.integers(std::vector<Index>{10'000});
      w.shared_text("chunks");
      chunks();
    });
    const std::uint32_t entry = w.put();
    for (Index i = 1; i < 10'000; ++i) {
      w.text(std::to_string(i));
      w.get(entry);
    }
    w.set_items();
  });
  EXPECT_THAT(outcome(std::move(w).finish()), HasSubstr("the same ones are used too often"));
}

// Empty chunks at one origin are indistinguishable; each is still found without a linear search.
TEST(DcpMetadataSize, PlacesManyChunksOfOneOrigin) {
  const TargetTensor tensor{"w", DType::kFloat32, {1}, {"w"}, {}};
  dcp::WrittenEntry entry{&tensor, "w", {"w"}, {}};
  for (Index i = 0; i < 100'000; ++i) entry.items.push_back({Box{{0}, {0}}, 0, i * 512, 0});
  entry.items.push_back({Box{{0}, {1}}, 0, 0, 512});
  EXPECT_EQ(outcome(dcp::write_metadata({entry}, {"__0_0.distcp"})), "opened");
}

}  // namespace
}  // namespace reshard::metadata_size_test
