// Tests whole checkpoints: planted damage is found, and healthy samples have no findings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <numeric>

#include "formats/open.h"
#include "lib/audit/values.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::check_values_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

RunOptions ample() {
  RunOptions options;
  options.threads = 2;
  options.memory = Index{1} << 30;
  return options;
}

ValueReport check(const std::string& path, const ValueContext& context = {}, const RunOptions& options = ample()) {
  auto open = open_checkpoint(path);
  EXPECT_TRUE(open) << open.error().message();
  Reader& reader = *open->reader;
  std::vector<std::size_t> all(reader.catalog().tensors().size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  EXPECT_TRUE(reader.locate(all, 1, "/tmp"));
  auto report = check_values(reader.catalog(), reader.files(), context, options);
  EXPECT_TRUE(report) << report.error().message();
  return *std::move(report);
}

std::vector<std::string> ids(const ValueReport& report) {
  std::vector<std::string> out;
  for (const Finding& f : report.findings) out.push_back(f.id);
  return out;
}

TEST(CheckValues, HealthySamplesGiveNothingToSay) {
  for (const auto& entry : std::filesystem::directory_iterator(sample(""))) {
    if (!std::filesystem::exists(entry.path() / "checkpoint/.metadata")) continue;
    const std::string name = entry.path().filename();
    const ValueReport report = check(sample(name) + "/checkpoint");
    EXPECT_GT(report.tensors.size(), 10u) << name;
    EXPECT_GT(report.checksums_checked, 0) << name;
    for (const Finding& f : report.findings) ADD_FAILURE() << name << ": " << f.id << ": " << f.what << f.why.front();
    for (const ValueRow& row : report.tensors) EXPECT_EQ(row.health.nans + row.health.infs, 0) << name << row.name;
  }
}

// The tensors of a sample, to be damaged and written again.
class Damaged : public testing::Test {
 protected:
  template <class T>
  void put(const std::string& tensor, Index element, T bits) {
    std::memcpy(values_.at(tensor).bytes.data() + element * static_cast<Index>(sizeof(T)), &bits, sizeof(T));
  }
  void clear_rows(const std::string& tensor, Index begin, Index end) {
    TensorValue& v = values_.at(tensor);
    const auto row = v.bytes.size() / static_cast<std::size_t>(v.shape[0]);
    std::fill_n(v.bytes.begin() + static_cast<std::ptrdiff_t>(row) * begin, row * static_cast<std::size_t>(end - begin),
                '\0');
  }
  ValueReport write_and_check(const ValueContext& context = {}) {
    write_dcp(values_, dir_ / "ck", *Mesh::parse("dp_shard=4"));
    return check(dir_ / "ck", context);
  }

  TensorValues values_ = load_checkpoint(sample("fsdp2_tp2_optim") + "/checkpoint");
  TempDir dir_;
};

TEST_F(Damaged, NanAndInfinityAreFoundWhereTheyAre) {
  put<std::uint32_t>("layers.1.feed_forward.w1.weight", 100 * 64 + 3, 0x7fc00001);
  put<std::uint32_t>("layers.1.feed_forward.w1.weight", 170 * 64, 0xff800000);
  put<std::uint32_t>("optimizer.state.output.weight.exp_avg", 64, 0xffffffff);
  const ValueReport report = write_and_check();
  ASSERT_THAT(ids(report), ElementsAre("non-finite-weights", "non-finite-optimizer"));
  EXPECT_THAT(report.findings[0].why, ElementsAre("layers.1.feed_forward.w1.weight: 1 NaN and 1 infinite of 11,264 "
                                                  "elements, the first at index 100 of dimension 0"));
  EXPECT_THAT(report.findings[1].tensors, ElementsAre("optimizer.state.output.weight.exp_avg"));
}

TEST_F(Damaged, ClearedRowsAreFound) {
  clear_rows("layers.0.attention.wq.weight", 16, 32);
  clear_rows("tok_embeddings.weight", 7, 9);
  clear_rows("tok_embeddings.weight", 996, 1000);
  const ValueReport report = write_and_check({{"tok_embeddings.weight", "output.weight"}, 990});
  ASSERT_THAT(ids(report), ElementsAre("zero-rows", "unused-tokens", "padding-rows"));
  EXPECT_THAT(report.findings[0].why, ElementsAre("layers.0.attention.wq.weight: 16 of 64 rows: 16..31"));
  EXPECT_THAT(report.findings[1].why, ElementsAre("tok_embeddings.weight: 2 of the 990 rows hold zeros: 7..8"));
  EXPECT_THAT(report.findings[2].why[0],
              HasSubstr("4 of the 10 rows after the true vocabulary of 990 hold zeros: 996..999"));
}

TEST_F(Damaged, AClearedWeightIsFoundAndInTheTable) {
  clear_rows("layers.0.attention.wo.weight", 0, 64);
  const ValueReport report = write_and_check();
  ASSERT_THAT(ids(report), ElementsAre("zero-weights"));
  for (const ValueRow& row : report.tensors)
    if (row.name == "layers.0.attention.wo.weight") {
      EXPECT_EQ(row.zero_percent(), 100);
      EXPECT_EQ(row.health.absmax, 0);
    }
}

TEST(CheckValues, DigestsAreThoseOfAPlainRun) {
  const std::string path = sample("fsdp8") + "/checkpoint";
  auto open = open_checkpoint(path);
  ASSERT_TRUE(open);
  const Catalog& catalog = open->reader->catalog();
  std::vector<std::size_t> all(catalog.tensors().size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  ASSERT_TRUE(open->reader->locate(all, 1, "/tmp"));
  std::vector<DigestRequest> requests;
  for (const std::size_t i : all) requests.push_back({i, catalog.tensors()[i].dtype});
  FileSource source(catalog, open->reader->files());
  const auto plain = digest_tensors(requests, source, ample());
  ASSERT_TRUE(plain);
  const ValueReport report = check(path);
  ASSERT_EQ(report.proofs.size(), plain->size());
  for (const std::size_t i : all) EXPECT_EQ(report.proofs[i].source, (*plain)[i].source);
}

TEST(CheckValues, TooLittleMemoryIsSaidBeforeAnythingIsRead) {
  auto open = open_checkpoint(sample("fsdp8") + "/checkpoint");
  ASSERT_TRUE(open);
  RunOptions options = ample();
  options.memory = 1 << 20;
  const auto report = check_values(open->reader->catalog(), open->reader->files(), {}, options);
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code(), ErrorCode::kUsage);
}

}  // namespace
}  // namespace reshard::check_values_test
