// Runs the exchange that GPUs are checked with between CPU devices, over the local transport.
#include <gtest/gtest.h>

#include "tests/support/exchange_checks.h"
#include "tests/support/local_ranks.h"

namespace reshard::device_exchange_test {
namespace {

TEST(DeviceExchange, MakesColumnShardsOfRowShards) {
  for (int n : {1, 2, 3, 4, 8}) {
    const Status status = run_local_ranks(n, [](Transport& ranks) { return check_exchange(cpu_device(), ranks, 11); });
    EXPECT_TRUE(status) << n << " ranks: " << status.error().message();
  }
}

}  // namespace
}  // namespace reshard::device_exchange_test
