#include "formats/encoding/zip.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "lib/device/crc32.h"
#include "tests/support/temp_dir.h"

namespace reshard::zip_test {
namespace {

class Zip : public testing::Test {
 protected:
  // Opens these bytes as an archive that begins at `base` of a file.
  Result<zip::Archive> open(const std::string& bytes, Index base = 0) {
    const std::string path = directory_.write("a.zip", std::string(static_cast<std::size_t>(base), '#') + bytes + "##");
    file_.emplace(*File::open(path));
    return zip::Archive::open(*file_, base, static_cast<Index>(bytes.size()));
  }
  std::string error_of(const std::string& bytes) {
    auto archive = open(bytes);
    if (archive) return "";
    std::string m = archive.error().message();
    const std::size_t at = m.find("a.zip");
    return at == std::string::npos ? m : m.substr(at);
  }

  TempDir directory_;
  std::optional<File> file_;
};

std::string two_members() {
  zip::Builder b(0);
  b.add("x/one", "first");
  b.add("x/two", "second!");
  return std::move(b).finish().before;
}

template <class T>
void set(std::string& bytes, std::size_t at, T v) {
  std::memcpy(bytes.data() + at, &v, sizeof v);
}

TEST_F(Zip, ReadsWhatItBuilds) {
  const auto archive = open(two_members(), 1000);
  ASSERT_TRUE(archive) << archive.error().message();
  ASSERT_EQ(archive->entries().size(), 2u);
  const zip::Entry* two = archive->find("x/two");
  ASSERT_NE(two, nullptr);
  EXPECT_EQ(two->offset, 1000 + 30 + 5 + 5 + 30 + 5);
  EXPECT_EQ(*archive->read(*two, 100), "second!");
  EXPECT_EQ(two->crc, crc32(0, as_bytes("second!")));
  EXPECT_FALSE(archive->read(*two, 6));
  EXPECT_EQ(archive->find("x/three"), nullptr);
}

TEST_F(Zip, ChecksumIsTheOneOfZip) {
  zip::Builder b(0);
  b.add("x/digits", "123456789");
  const auto archive = open(std::move(b).finish().before);
  ASSERT_TRUE(archive) << archive.error().message();
  EXPECT_EQ(archive->find("x/digits")->crc, 0xCBF43926u);
}

TEST_F(Zip, RefusesDamagedPayloadsWhenTheyAreRead) {
  std::string bytes = two_members();
  bytes[bytes.find("second")] ^= 1;
  const auto archive = open(bytes);
  ASSERT_TRUE(archive);
  const auto read = archive->read(*archive->find("x/two"), 100);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code(), ErrorCode::kCorrupt);
}

TEST_F(Zip, RefusesWhatIsNoArchive) {
  EXPECT_EQ(error_of(std::string(100, '\0')),
            "a.zip@0x0: zip archive: expected the bytes 50 4b 03 04, got 00 00 00 00; not an archive, or stale, or "
            "overwritten");
  EXPECT_EQ(error_of("PK"), "a.zip@0x0: zip archive: expected at least 22 bytes, got 2");
  EXPECT_NE(error_of(two_members() + "x"), "");
}

TEST_F(Zip, RefusesAPartOfSeveral) {
  std::string bytes = two_members();
  set<std::uint16_t>(bytes, bytes.size() - 22 + 8, 1);  // entries on this disk
  EXPECT_THAT(error_of(bytes), testing::EndsWith("zip end record: expected an archive of one part"));
}

TEST_F(Zip, RefusesCompressedMembersByName) {
  std::string bytes = two_members();
  set<std::uint16_t>(bytes, bytes.find("PK\x01\x02") + 10, 8);
  const auto archive = open(bytes);
  ASSERT_FALSE(archive);
  EXPECT_EQ(archive.error().code(), ErrorCode::kUnsupported);
  EXPECT_NE(archive.error().message().find("member 'x/one': is compressed (method 8)"), std::string::npos);
}

TEST_F(Zip, RefusesLocalHeadersThatContradictTheDirectory) {
  const std::string good = two_members();
  std::string bytes = good;
  bytes[30] = 'y';  // the name in the local header
  EXPECT_EQ(error_of(bytes), "a.zip@0x0: member 'x/one': local name: got 'y/one'");
  bytes = good;
  set<std::uint32_t>(bytes, 22, 4);
  EXPECT_EQ(error_of(bytes), "a.zip@0x0: member 'x/one': local size: expected 5, got 4 stored in 5");
  bytes = good;
  bytes[14] ^= 1;
  EXPECT_NE(error_of(bytes).find("local crc"), std::string::npos);
  bytes = good;
  set<std::uint16_t>(bytes, 8, 8);
  EXPECT_NE(error_of(bytes).find("is compressed"), std::string::npos);
}

TEST_F(Zip, RefusesNamesThatComeTwice) {
  std::string bytes = two_members();
  for (std::size_t at = bytes.find("x/two"); at != std::string::npos; at = bytes.find("x/two"))
    bytes.replace(at, 5, "x/one");
  EXPECT_NE(error_of(bytes).find("member 'x/one': comes twice"), std::string::npos);
}

TEST_F(Zip, RefusesOverlappingMembers) {
  // The second member is inside the first one's payload.
  zip::Builder inner(0);
  inner.add("x/two", "second!");
  const std::string inside = std::move(inner).finish().before.substr(0, 30 + 5 + 7);
  zip::Builder outer(0);
  outer.add("x/one", inside);
  outer.add("x/two", "second!");
  std::string bytes = std::move(outer).finish().before;
  const std::size_t second = bytes.rfind("PK\x01\x02");
  set<std::uint32_t>(bytes, second + 42, 35);
  EXPECT_NE(error_of(bytes).find("member 'x/two': overlaps member 'x/one'"), std::string::npos) << error_of(bytes);
}

TEST_F(Zip, ReadsZip64Numbers) {
  // torch ends every archive with a zip64 end record and its locator.
  std::string bytes = two_members();
  const std::size_t end = bytes.size() - 22;
  const std::size_t directory = bytes.find("PK\x01\x02");
  std::string end64(56 + 20, '\0');
  std::memcpy(end64.data(), "PK\x06\x06", 4);
  set<std::uint64_t>(end64, 4, 44);
  set<std::uint64_t>(end64, 24, 2);
  set<std::uint64_t>(end64, 32, 2);
  set<std::uint64_t>(end64, 40, end - directory);
  set<std::uint64_t>(end64, 48, directory);
  std::memcpy(end64.data() + 56, "PK\x06\x07", 4);
  set<std::uint64_t>(end64, 64, end);
  set<std::uint32_t>(end64, 72, 1);
  std::string with = bytes.substr(0, end) + end64 + bytes.substr(end);
  EXPECT_EQ(error_of(with), "");
  set<std::uint32_t>(with, with.size() - 22 + 16, 0xFFFFFFFF);  // only the zip64 record has the offset
  for (const std::size_t count : {8, 10}) set<std::uint16_t>(with, with.size() - 22 + count, 0xFFFF);
  EXPECT_EQ(error_of(with), "");
  set<std::uint32_t>(with, with.size() - 22 + 12, 1);
  EXPECT_NE(error_of(with).find("contradicts the end record"), std::string::npos);
}

TEST_F(Zip, MembersBeyond4GiBAreReadWithTwoSmallReads) {
  const Index size = (Index{1} << 32) + 4096;
  zip::Builder b(0);
  b.add("x/one", "first");
  b.add_hole("x/big", size, 7, 64);
  const auto around = std::move(b).finish();
  const std::string path = directory_.path() + "/big.zip";
  const File file = *File::create(path);
  const Index after = static_cast<Index>(around.before.size()) + size;
  ASSERT_TRUE(file.write_at(0, as_bytes(around.before)));
  ASSERT_TRUE(file.write_at(after, as_bytes(around.after[0])));  // sparse in between
  const auto archive = zip::Archive::open(file, 0, after + static_cast<Index>(around.after[0].size()));
  ASSERT_TRUE(archive) << archive.error().message();
  const zip::Entry* big = archive->find("x/big");
  EXPECT_EQ(big->size, size);
  EXPECT_EQ(big->offset, static_cast<Index>(around.before.size()));
  EXPECT_EQ(big->offset % 64, 0);
  EXPECT_EQ(big->crc, 7u);
}

TEST_F(Zip, HoldsAnyNumberOfHolesOnEitherSideOf4GiB) {
  // A sparse file: two members start beyond 4 GiB, one is larger than that, and one is empty.
  const std::vector<Index> sizes = {3, Index{1} << 20, 0, Index{5} << 30, 7, 64};
  zip::Builder b(0);
  b.add("x/one", "first");
  for (std::size_t i = 0; i < sizes.size(); ++i)
    b.add_hole("x/" + std::to_string(i), sizes[i], static_cast<std::uint32_t>(i + 1), 64);
  b.add("x/last", "second!");
  const auto around = std::move(b).finish();
  ASSERT_EQ(around.after.size(), sizes.size());
  const File file = *File::create(directory_.path() + "/big.zip");
  ASSERT_TRUE(file.write_at(0, as_bytes(around.before)));
  Index end = static_cast<Index>(around.before.size());
  std::vector<Index> starts;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    starts.push_back(end);
    end += sizes[i];
    ASSERT_TRUE(file.write_at(end, as_bytes(around.after[i])));
    end += static_cast<Index>(around.after[i].size());
  }
  const auto archive = zip::Archive::open(file, 0, end);
  ASSERT_TRUE(archive) << archive.error().message();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const zip::Entry* e = archive->find("x/" + std::to_string(i));
    ASSERT_NE(e, nullptr);
    EXPECT_EQ(e->offset, starts[i]);
    EXPECT_EQ(e->offset % 64, 0);
    EXPECT_EQ(e->size, sizes[i]);
    EXPECT_EQ(e->crc, i + 1);
  }
  const zip::Entry* last = archive->find("x/last");
  EXPECT_GT(last->offset, Index{5} << 30);
  EXPECT_EQ(*archive->read(*last, 100), "second!");
}

TEST_F(Zip, CountsMoreThan65535Members) {
  for (const int n : {65534, 65535, 70000}) {
    zip::Builder b(0);
    for (int i = 0; i < n; ++i) b.add("x/" + std::to_string(i), "");
    const std::string bytes = std::move(b).finish().before;
    EXPECT_EQ(bytes.find("PK\x06\x06") != std::string::npos, n >= 65535) << n;
    const auto archive = open(bytes);
    ASSERT_TRUE(archive) << archive.error().message();
    EXPECT_EQ(archive->entries().size(), static_cast<std::size_t>(n));
  }
}

TEST_F(Zip, EveryTruncationIsAnError) {
  const std::string whole = two_members();
  for (std::size_t n = 0; n < whole.size(); ++n) EXPECT_NE(error_of(whole.substr(0, n)), "") << n;
}

}  // namespace
}  // namespace reshard::zip_test
