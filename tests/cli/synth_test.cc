// Tests what synth makes up.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/support/checkpoints.h"
#include "tests/support/expect_run.h"
#include "tests/support/temp_dir.h"

namespace reshard::synth_test {
namespace {

TEST(Synth, AnOptimizerHasMadeOneNumberOfSteps) {
  const TempDir dir;
  expect_success(reshard_cli(
      {"synth", dir / "dcp", "--model", "llama3-tiny", "--layers", "1", "--mesh", "dp_shard=2", "--optimizer", "-q"}));
  int parameters = 0;
  for (const auto& [name, value] : load_checkpoint(dir / "dcp")) {
    if (!name.ends_with(".step")) continue;
    float steps = 0;
    ASSERT_EQ(value.bytes.size(), sizeof steps) << name;
    std::memcpy(&steps, value.bytes.data(), sizeof steps);
    EXPECT_EQ(steps, 1000) << name;
    ++parameters;
  }
  EXPECT_EQ(parameters, 12);
}

}  // namespace
}  // namespace reshard::synth_test
