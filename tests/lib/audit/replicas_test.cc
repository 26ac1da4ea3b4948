#include "lib/audit/replicas.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>

#include "formats/dcp/dcp.h"
#include "formats/dcp/metadata.h"
#include "formats/open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/dcp_metadata.h"
#include "tests/support/temp_dir.h"

namespace reshard::replicas_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

RunOptions ample() {
  RunOptions options;
  options.threads = 2;
  options.memory = Index{1} << 30;
  return options;
}

// A DCP directory with two float32 tensors: "w", [4, 6], in two boxes, and "b", [3]. Every rank of a replica group has
// written its own copy with its own metadata, as torch does without collectives.
class ReplicatedCheckpoint {
 public:
  explicit ReplicatedCheckpoint(int replicas) : replicas_(replicas) {
    for (int r = 0; r < replicas; ++r) {
      put("w", {{0, 0}, {2, 6}}, r);
      put("w", {{2, 0}, {2, 6}}, r);
      put("b", {{0}, {3}}, r);
    }
  }
  struct Item {
    std::string tensor;
    Box box;
    int replica = 0;
    Index offset = 0, length = 0;
    std::vector<float> values;
  };
  Item& item(std::size_t i) { return items_[i]; }
  // Returns the file offset of an item's payload. Its header has the same length for every checksum.
  static Index payload(const Item& item) {
    const std::string bytes = dcp_item(DType::kFloat32, item.box.shape, item.offset, raw(item.values));
    return item.offset + static_cast<Index>(bytes.find(raw(item.values)));
  }
  // Leaves item `i` out of its file: its metadata refer to item `like`.
  void share(std::size_t i, std::size_t like) { shared_.emplace_back(i, like); }

  std::string write() {
    std::vector<std::string> files(static_cast<std::size_t>(replicas_));
    std::vector<std::string> names;
    for (int r = 0; r < replicas_; ++r) names.push_back("__" + std::to_string(r) + "_0.distcp");
    for (Item& it : items_) {
      std::string& file = files[static_cast<std::size_t>(it.replica)];
      it.offset = static_cast<Index>(file.size());
      const std::string bytes = dcp_item(DType::kFloat32, it.box.shape, it.offset, raw(it.values));
      it.length = static_cast<Index>(bytes.size());
      file += bytes;
    }
    for (const auto& [i, like] : shared_) {
      items_[i].replica = items_[like].replica;
      items_[i].offset = items_[like].offset;
    }
    const TargetTensor w{"w", DType::kFloat32, {4, 6}, {"w"}, {}}, b{"b", DType::kFloat32, {3}, {"b"}, {}};
    for (std::size_t r = 0; r < files.size(); ++r) {
      dcp::WrittenEntry entry_w{&w, "w", {"w"}, {}}, entry_b{&b, "b", {"b"}, {}};
      for (std::size_t i = r * kItems; i < (r + 1) * kItems; ++i)
        (items_[i].tensor == "w" ? entry_w : entry_b)
            .items.push_back(
                {items_[i].box, static_cast<std::uint32_t>(items_[i].replica), items_[i].offset, items_[i].length});
      dir_.write("ck/__" + std::to_string(r) + ".metadata", dcp::write_metadata({entry_w, entry_b}, names));
    }
    for (std::size_t r = 0; r < files.size(); ++r) dir_.write("ck/" + names[r], files[r]);
    return dir_ / "ck";
  }

 private:
  static std::string raw(const std::vector<float>& v) {
    return {reinterpret_cast<const char*>(v.data()), v.size() * sizeof(float)};
  }
  void put(const std::string& tensor, const Box& box, int replica) {
    std::vector<float> values(static_cast<std::size_t>(volume(box)));
    std::iota(values.begin(), values.end(), static_cast<float>(100 * box.origin[0] + 1));
    items_.push_back({tensor, box, replica, 0, 0, std::move(values)});
  }

  static constexpr std::size_t kItems = 3;  // per replica
  int replicas_;
  TempDir dir_;
  std::vector<Item> items_;
  std::vector<std::pair<std::size_t, std::size_t>> shared_;
};

Result<ReplicaReport> compare(const std::string& path, RunOptions options = ample()) {
  const OpenCheckpoint open = TRY(open_checkpoint(path));
  std::vector<std::size_t> all(open.reader->catalog().tensors().size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  TRY(open.reader->locate(all, 1, "/tmp"));
  TRY(validate(open.reader->catalog()));
  return compare_replicas(open.reader->catalog(), open.reader->files(), options);
}

TEST(Replicas, CopiesThatAgreeAreCounted) {
  for (const int replicas : {1, 2, 4}) {
    ReplicatedCheckpoint ck(replicas);
    Index done = 0;
    RunOptions options = ample();
    options.threads = 1;
    options.progress = [&](Index bytes) { done = bytes; };
    const auto report = compare(ck.write(), options);
    ASSERT_TRUE(report) << report.error().message();
    EXPECT_EQ(report->copies, 3 * (replicas - 1));
    EXPECT_EQ(report->tensors, replicas > 1 ? 2 : 0);
    EXPECT_EQ(report->bytes, (24 + 3) * 4 * (replicas - 1));
    EXPECT_EQ(report->checksums_checked, replicas > 1 ? 3 * replicas : 0);
    EXPECT_THAT(report->findings, IsEmpty());
    if (replicas == 2) {
      EXPECT_EQ(done, report->bytes);
    }
  }
}

TEST(Replicas, ACopyThatDiffersIsNamedWithBothPlaces) {
  ReplicatedCheckpoint ck(3);
  auto& second = ck.item(3 + 1);  // replica 1 of w[2:4]
  second.values[7] = -1;
  second.values[9] = -1;
  const std::string path = ck.write();
  const auto report = compare(path);
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_EQ(report->copies, 6);
  ASSERT_THAT(report->findings, SizeIs(1));
  const Finding& f = report->findings[0];
  EXPECT_EQ(f.id, "replicas-disagree");
  EXPECT_EQ(f.severity, Severity::kError);
  EXPECT_THAT(f.tensors, ElementsAre("w"));
  EXPECT_EQ(f.what, "two copies of one box differ");
  const std::string first = "__0_0.distcp@" + std::to_string(ReplicatedCheckpoint::payload(ck.item(1)) + 7 * 4);
  const std::string other = "__1_0.distcp@" + std::to_string(ReplicatedCheckpoint::payload(second) + 7 * 4);
  EXPECT_THAT(f.why,
              ElementsAre("[2:4, 0:6]: 2 of 12 elements differ, the first at [3, 1], at " + first + " and " + other));
}

TEST(Replicas, EveryCopyIsComparedAndEveryTensorNamed) {
  ReplicatedCheckpoint ck(3);
  ck.item(3).values[0] = -1;   // replica 1 of w[0:2]
  ck.item(6).values[11] = -1;  // replica 2 of it
  ck.item(8).values[2] = -1;   // replica 2 of b
  const auto report = compare(ck.write());
  ASSERT_TRUE(report) << report.error().message();
  ASSERT_THAT(report->findings, SizeIs(2));
  const bool b_first = report->findings[0].tensors[0] == "b";
  const Finding &w = report->findings[b_first ? 1 : 0], &b = report->findings[b_first ? 0 : 1];
  EXPECT_EQ(w.what, "2 copies differ from the first copy of their box");
  EXPECT_THAT(w.why, ElementsAre(HasSubstr("1 of 12 elements differs, at [0, 0], at __0_0.distcp@"),
                                 HasSubstr("1 of 12 elements differs, at [1, 5], at __0_0.distcp@")));
  EXPECT_THAT(b.why, ElementsAre(HasSubstr("1 of 3 elements differs, at [2]")));
}

TEST(Replicas, ACopyOnTheSameBytesIsNoCopy) {
  ReplicatedCheckpoint ck(2);
  ck.share(3, 0);
  const auto report = compare(ck.write());
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_EQ(report->copies, 2);
  EXPECT_EQ(report->shared, 1);
  ASSERT_THAT(report->findings, SizeIs(1));
  EXPECT_EQ(report->findings[0].id, "replicas-shared");
  EXPECT_EQ(report->findings[0].severity, Severity::kWarning);
}

TEST(Replicas, ChecksumsOfCopiesAreChecked) {
  ReplicatedCheckpoint ck(2);
  const std::string path = ck.write();
  std::string bytes = read_file(path + "/__1_0.distcp");
  bytes[static_cast<std::size_t>(ReplicatedCheckpoint::payload(ck.item(4)))] ^= 1;
  write_file(path + "/__1_0.distcp", bytes);
  const auto report = compare(path);
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(report.error().message(), AllOf(HasSubstr("__1_0.distcp"), HasSubstr("CRC-32")));
}

TEST(Replicas, SamplesHaveNone) {
  const auto report = compare(sample("hsdp2x4") + "/checkpoint");
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_EQ(report->copies, 0);
}

}  // namespace
}  // namespace reshard::replicas_test
