// Tests verify() on a checkpoint that changes while it is read.
#include "lib/audit/verification.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>

#include "formats/open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/must.h"
#include "tests/support/temp_dir.h"

namespace reshard::verification_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

TEST(Verification, OfFilesThatChangeMeanwhileItSaysThatFirst) {
  const TempDir dir;
  for (const char* name : {"one", "other"}) copy_sample("tp8", dir / name);
  for (const std::string changed : {"one", "other", ""}) {
    const std::string file = dir / (changed + "/checkpoint/__3_0.distcp");
    VerifyOptions options;
    options.path = dir / "one/checkpoint";
    options.against = dir / "other/checkpoint";
    options.bytes = true;
    int calls = 0;
    options.watch = [&](Index) {  // called before the data is read, and before it is compared
      const int when = changed == "one" ? 1 : changed == "other" ? 2 : 0;
      if (++calls == when) fs::last_write_time(file, fs::last_write_time(file) + std::chrono::seconds(1));
      return [](Index) {};
    };
    const VerifyReport report = must(verify(open_checkpoint, options));
    ASSERT_EQ(report.findings.size(), changed.empty() ? 0 : 1) << changed;
    if (changed.empty()) continue;
    EXPECT_EQ(report.findings[0].id, "changed-meanwhile");
    EXPECT_EQ(report.findings[0].severity, Severity::kError);
    EXPECT_THAT(report.findings[0].what, HasSubstr(file + ": the file changed while it was read"));
  }
}

}  // namespace
}  // namespace reshard::verification_test
