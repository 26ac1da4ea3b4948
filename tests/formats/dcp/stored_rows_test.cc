// A `.metadata` parsed row by row gives the same as parsed value by value, or the row parser declines it.
#include "formats/dcp/stored_rows.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <random>

#include "formats/dcp/metadata.h"
#include "tests/support/checkpoints.h"
#include "tests/support/dcp_metadata.h"
#include "tests/support/must.h"
#include "tests/support/soak.h"

namespace reshard::stored_rows_test {
namespace {

std::optional<Catalog> read_by_rows(const std::string& bytes) {
  const File file = must(File::create_in_memory());
  EXPECT_TRUE(file.write_at(0, as_bytes(bytes)));
  return dcp::read_by_rows(file);
}

std::optional<Catalog> read_by_values(const std::string& bytes) {
  Catalog catalog;
  const auto document = pickle::parse(bytes, "p");
  if (!document) return std::nullopt;
  dcp::MetadataReader reader(catalog);
  if (!reader.add(*document, "p") || !reader.finish()) return std::nullopt;
  return catalog;
}

std::string metadata_of(const std::string& name) { return read_file(test_data(name) + "/.metadata"); }

// Metadata written by many ranks and by one, with objects among the tensors, shared sizes and scalars.
TEST(DcpStoredRows, RealMetadataAreReadByRows) {
  for (const std::string& path :
       {test_data("dcp_small/ck2"), test_data("dcp_small/ckf_fsdptp"), test_data("dcp_small/ckf_hsdp"),
        test_data("runs/tutorial_app_state/checkpoint"), sample("fsdp16") + "/checkpoint"}) {
    SCOPED_TRACE(path);
    const std::string bytes = read_file(path + "/.metadata");
    const auto rows = read_by_rows(bytes), values = read_by_values(bytes);
    ASSERT_TRUE(values);
    ASSERT_TRUE(rows);
    EXPECT_TRUE(dcp::are_same(*rows, *values));
  }
}

// Torch puts 1,000 objects at a time into a list or dict, with other opcodes for a single one.
TEST(DcpStoredRows, WrittenMetadataAreReadByRows) {
  for (const Index pieces : {1, 2, 999, 1000, 1001, 2500}) {
    SCOPED_TRACE(pieces);
    const TargetTensor tensor{"w", DType::kFloat32, {pieces, 3, 5, 7}, {"w"}, {}};
    const TargetTensor scalar{"s", DType::kFloat32, {}, {"s"}, {}};
    dcp::WrittenEntry entry{&tensor, "w", {"w"}, {}};
    for (Index i = 0; i < pieces; ++i)
      entry.items.push_back({Box{{i, 0, 0, 0}, {1, 3, 5, 7}}, static_cast<std::uint32_t>(i % 3), i << 33, 512});
    dcp::WrittenEntry other{&scalar, "s", {"s"}, {{Box{}, 2, 7, 9}}};
    dcp::WrittenEntry blob{nullptr, "b", {"b"}, {{Box{}, 0, 1, 2}}};
    const std::string bytes =
        dcp::write_metadata({entry, other, blob}, {"__0_0.distcp", "__1_0.distcp", "a/__2_0.distcp"});
    const auto rows = read_by_rows(bytes), values = read_by_values(bytes);
    ASSERT_TRUE(values);
    ASSERT_TRUE(rows);
    EXPECT_TRUE(dcp::are_same(*rows, *values));
  }
}

// Since torch 2.8, ranks without rows of a tensor write an empty item behind its end. place() tells these from empty
// items at a valid position.
TEST(DcpStoredRows, EmptyItemsBehindTheEndAreReadByRows) {
  const TargetTensor tensor{"w", DType::kFloat32, {2, 8}, {"w"}, {}};
  for (const Index place : {2, 1}) {
    SCOPED_TRACE(place);
    const dcp::WrittenEntry entry{
        &tensor,
        "w",
        {"w"},
        {{Box{{0, 0}, {1, 8}}, 0, 0, 512}, {Box{{1, 0}, {1, 8}}, 1, 0, 512}, {Box{{place, 0}, {0, 8}}, 2, 0, 512}}};
    const std::string bytes = dcp::write_metadata({entry}, {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp"});
    const auto rows = read_by_rows(bytes), values = read_by_values(bytes);
    ASSERT_TRUE(values);
    ASSERT_EQ(rows.has_value(), place == 2);
    if (rows) {
      EXPECT_TRUE(dcp::are_same(*rows, *values));
    }
  }
}

// Long metadata is read a megabyte at a time, and bytes that only contained rows are released. Tested with boundaries
// at arbitrary bytes, and with file names that are used again after their bytes were released.
TEST(DcpStoredRows, LongMetadataAreReadAsTheyAreNeeded) {
  const TargetTensor tensor{"w", DType::kFloat32, {30'000, 3}, {"w"}, {}};
  std::vector<std::string> files;
  for (int k = 0; k < 500; ++k) files.push_back("__" + std::to_string(k) + "_0.distcp");
  dcp::WrittenEntry entry{&tensor, "w", {"w"}, {}};
  for (Index i = 0; i < tensor.shape[0]; ++i)
    entry.items.push_back({Box{{i, 0}, {1, 3}}, static_cast<std::uint32_t>(i * 7 % 500), i << 20, 512});
  const TargetTensor scalar{"s", DType::kFloat32, {}, {"s"}, {}};
  for (std::size_t shift = 0; shift < 64; shift += kSanitized ? 32 : 3) {
    SCOPED_TRACE(shift);
    const std::string name = std::string(shift, 'a');  // sorts first
    dcp::WrittenEntry first{&scalar, name, {name}, {{Box{}, 2, 7, 9}}};
    const std::string bytes = dcp::write_metadata({first, entry}, files);
    ASSERT_GT(bytes.size(), std::size_t{2} << 20);
    const auto rows = read_by_rows(bytes), values = read_by_values(bytes);
    ASSERT_TRUE(values);
    ASSERT_TRUE(rows);
    EXPECT_TRUE(dcp::are_same(*rows, *values));
    EXPECT_FALSE(read_by_rows(bytes.substr(0, bytes.size() - 1)));
  }
}

// The row parser never accepts damaged metadata, or reads it differently, if the value parser refuses it.
TEST(DcpStoredRows, DamagedMetadataAreNotReadOtherwise) {
  std::mt19937 random(18);
  int taken = 0;
  for (const std::string name : {"dcp_small/ck2", "dcp_small/ck1", "dcp_small/wt"}) {
    const std::string bytes = metadata_of(name);
    const std::string opcodes = "()KMJhjqrRbuetas]}N\x81\x85\x86\x87\x8a\x8c\x94\x95.";
    for (int k = 0; k < 300; ++k) {
      std::string damaged = bytes;
      const std::size_t at = random() % damaged.size();
      switch (k % 4) {
        case 0:
          damaged[at] = static_cast<char>(random());
          break;
        case 1:
          damaged[at] = opcodes[random() % opcodes.size()];
          break;
        case 2:
          damaged.erase(at, 1 + random() % 8);
          break;
        default:
          damaged.insert(at, damaged.substr(random() % damaged.size(), 1 + random() % 40));
      }
      const auto rows = read_by_rows(damaged);
      if (!rows) continue;
      ++taken;
      const auto values = read_by_values(damaged);
      ASSERT_TRUE(values) << name << ", " << k;
      ASSERT_TRUE(dcp::are_same(*rows, *values)) << name << ", " << k;
    }
  }
  EXPECT_GT(taken, 20);
}

}  // namespace
}  // namespace reshard::stored_rows_test
