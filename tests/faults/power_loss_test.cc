// Tests power losses during a conversion: in every state that the disk may have then, nothing incomplete looks
// finished, and the same command gives the usual output.
#include "tests/support/power_loss.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <set>

#include "formats/open.h"
#include "lib/convert/conversion.h"
#include "tests/support/checkpoints.h"
#include "tests/support/local_ranks.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::power_loss_test {
namespace {

namespace fs = std::filesystem;
using Files = std::map<std::string, std::string>;

struct Scenario {
  std::string name, to = "dcp", mesh = "dp_shard=3";
  bool replaces = false;   // there is a checkpoint to replace
  bool continues = false;  // an earlier run left something behind
  Resume resume = Resume::kAuto;
  int ranks = 1, zstd_level = 0;
  bool has_plain_renames = false;  // on a file system without the flags of renameat2
};

class PowerLossTest : public testing::Test {
 protected:
  PowerLossTest() {
    TensorValues values;
    std::mt19937 random(5);
    for (int i = 0; i < 8; ++i) {
      const Index rows = i == 5 ? 300 : 5 + static_cast<Index>(random() % 40);
      TensorValue v{DType::kFloat32, {rows, 20}, std::string(static_cast<std::size_t>(rows) * 80, '\0')};
      for (char& c : v.bytes) c = static_cast<char>(random() & 0x3f);
      values["layers." + std::to_string(i) + ".w"] = std::move(v);
    }
    write_dcp(values, source_, Mesh({{"dp_shard", 2}}));
    fs::create_directory(disk_);
  }

  Status convert_on(const Scenario& s, Transport* ranks) const {
    auto open = TRY(open_checkpoint(source_));
    ConversionOptions o;
    o.source_path = source_;
    if (!s.mesh.empty()) o.placement.mesh = TRY(Mesh::parse(s.mesh));
    o.resume = s.resume;
    o.group_bytes = 6'000;
    if (s.zstd_level > 0) o.compression.zstd_level = s.zstd_level;
    o.run.threads = 1;
    o.run.memory = Index{1} << 28;
    o.run.ranks = ranks;
    const auto conversion = TRY(Conversion::prepare(*open.reader, *TRY(find_format(s.to)), std::move(o)));
    TRY(conversion->run({out_, s.replaces ? files_of_checkpoint : nullptr}));
    return {};
  }
  Status convert(const Scenario& s) const {
    std::optional<ScopedSyscalls> plain;
    if (s.has_plain_renames) plain.emplace(without_rename_flags());
    if (s.ranks == 1) return convert_on(s, nullptr);
    return run_local_ranks(s.ranks, [&](Transport& ranks) { return convert_on(s, &ranks); });
  }

  // Returns all files at the destination.
  Files files() const {
    if (!fs::exists(out_)) return {};
    return fs::is_directory(out_) ? all_files(out_) : Files{{"", read_file(out_)}};
  }

  // Prepares the disk for a scenario: empty, or with an existing checkpoint or leftover.
  void begin(const Scenario& s) {
    fs::remove_all(disk_);
    fs::create_directory(disk_);
    if (s.replaces) {
      Scenario first = s;
      first.replaces = first.continues = false;
      if (s.mesh.empty())
        first.zstd_level = 3;
      else
        first.mesh = "dp_shard=2";
      const DiskRecorder quiet(disk_);
      ASSERT_TRUE(convert(first));
    }
    if (!s.continues) return;
    // Half of a run, completely synced.
    std::mt19937 random(1);
    const DiskRecorder recorder(disk_);
    Scenario first = s;
    first.continues = false;
    ASSERT_TRUE(convert(first));
    const auto& all = recorder.operations();
    int writes = 0;
    int end = 0;
    const auto count =
        std::count_if(all.begin(), all.end(), [](const auto& o) { return o.kind == DiskOperation::Kind::kWrite; });
    while (writes < count * 3 / 5) writes += all[static_cast<std::size_t>(end++)].kind == DiskOperation::Kind::kWrite;
    state_after(recorder.before(), all, end, {}, {}, random).write(disk_);
  }

  // Returns what is wrong with a state or with the next run from it; empty if nothing.
  std::string violation(const Scenario& s, const Files& expected, const Files& old) const {
    const Files found = files();
    if (found.empty() && s.replaces) return "what was there is gone";
    if (!found.empty() && found != expected && found != old) return "what looks finished is not";
    if (!found.empty() && !s.replaces)
      return "";  // it is finished, and the next run would report that the destination exists
    Status status;
    {
      const DiskRecorder quiet(disk_);  // syncs nothing
      status = convert(s);
    }
    if (!status) return "the next run: " + status.error().message();
    if (files() != expected) return "the next run gives something else";
    for (const char* const end : {".partial", ".publishing"})
      if (fs::exists(out_ + end)) return "the next run leaves its work directory";
    return "";
  }

  struct Counts {
    Index states = 0, violations = 0;
  };
  // Tries up to `most` distinct states. `lies`: the disk ignores syncs.
  Counts lose_power(const Scenario& s, Index most, bool lies);

  TempDir dir_;
  std::string source_ = dir_ / "ck", disk_ = dir_ / "disk", out_ = disk_ + "/out";
};

PowerLossTest::Counts PowerLossTest::lose_power(const Scenario& s, Index most, bool lies) {
  Counts counts;
  begin(s);
  const Files old = files();
  const DiskState before = DiskState::read(disk_);
  std::vector<DiskOperation> all;
  {
    const DiskRecorder recorder(disk_);
    const Status status = convert(s);
    EXPECT_TRUE(status) << s.name << ": " << status.error().message();
    all = recorder.operations();
  }
  const Files expected = files();
  EXPECT_FALSE(expected.empty());
  EXPECT_NE(expected, old);

  // The fates of the unsynced operations: all lost, all done, all but one, only one, or a random choice.
  struct Case {
    int end = 0;
    std::vector<int> open;
    std::vector<Fate> fates;
  };
  std::mt19937 random(7);
  std::vector<Case> cases;
  for (int end = 0; end <= static_cast<int>(all.size()); ++end) {
    const std::vector<int> open = open_operations(all, end, lies);
    const auto add = [&](std::vector<Fate> fates) { cases.push_back({end, open, std::move(fates)}); };
    const auto can_tear = [&](std::size_t i) {
      return all[static_cast<std::size_t>(open[i])].kind == DiskOperation::Kind::kWrite;
    };
    for (const Fate others : {Fate::kDone, Fate::kLost}) {
      const std::vector<Fate> same(open.size(), others);
      add(same);
      for (std::size_t i = 0; i < open.size(); ++i)
        for (const Fate fate : {Fate::kDone, Fate::kLost, Fate::kTorn}) {
          if (fate == others || (fate == Fate::kTorn && !can_tear(i))) continue;
          std::vector<Fate> one = same;
          one[i] = fate;
          add(one);
        }
    }
    for (std::size_t n = 0; n < std::min<std::size_t>(40, open.size() * open.size()); ++n) {
      std::vector<Fate> any(open.size(), Fate::kDone);
      for (std::size_t i = 0; i < any.size(); ++i) {
        const unsigned r = random() % 8;
        if (r < 3) any[i] = Fate::kLost;
        if (r == 3 && can_tear(i)) any[i] = Fate::kTorn;
      }
      add(any);
    }
  }
  std::shuffle(cases.begin(), cases.end(), random);
  std::set<std::uint64_t> seen;
  for (const Case& c : cases) {
    if (counts.states >= most) break;
    const DiskState state = state_after(before, all, c.end, c.open, c.fates, random);
    if (!seen.insert(state.hash()).second) continue;
    ++counts.states;
    state.write(disk_);
    const std::string what = violation(s, expected, old);
    if (what.empty()) continue;
    ++counts.violations;
    if (lies || counts.violations > 5) continue;
    std::string fates;
    for (std::size_t i = 0; i < c.open.size(); ++i)
      fates += std::string(c.fates[i] == Fate::kDone   ? "\n  there  "
                           : c.fates[i] == Fate::kLost ? "\n  lost   "
                                                       : "\n  torn   ") +
               all[static_cast<std::size_t>(c.open[i])].text();
    ADD_FAILURE() << s.name << ", after " << c.end << " of " << all.size() << " calls: " << what << fates;
  }
  return counts;
}

const Scenario kScenarios[] = {
    {.name = "dcp"},
    {.name = "dcp, continued", .continues = true},
    {.name = "dcp, begun anew", .continues = true, .resume = Resume::kNever},
    {.name = "dcp, replacing", .replaces = true},
    {.name = "dcp, two ranks", .ranks = 2},
    {.name = "hdf5", .to = "hdf5", .mesh = ""},
    {.name = "hdf5, by way of a link", .to = "hdf5", .mesh = "", .has_plain_renames = true},
    {.name = "hdf5, compressed, replacing", .to = "hdf5", .mesh = "", .replaces = true, .zstd_level = 1},
    {.name = "torch_checkpointing", .to = "torch_checkpointing"},
};

TEST_F(PowerLossTest, TheSameCommandGivesTheSameFromEveryState) {
  Index states = 0;
  for (const Scenario& s : kScenarios) {
    const Counts counts = lose_power(s, in_soak() ? 5'000 : 40, false);
    EXPECT_EQ(counts.violations, 0) << s.name;
    std::printf("%s: %lld states\n", s.name.c_str(), static_cast<long long>(counts.states));
    states += counts.states;
  }
  std::printf("%lld states\n", static_cast<long long>(states));
}

// A disk that ignores syncs is noticed, so the test would find missing syncs.
TEST_F(PowerLossTest, ADiskThatLiesIsNoticed) {
  for (const int i : {0, 1, 5}) EXPECT_GT(lose_power(kScenarios[i], 60, true).violations, 0) << kScenarios[i].name;
}

}  // namespace
}  // namespace reshard::power_loss_test
