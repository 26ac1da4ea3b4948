#include "lib/transport/nccl.h"

#include <gtest/gtest.h>

#include "lib/device/device.h"
#include "tests/support/exchange_checks.h"
#include "tests/support/one_gpu_ranks.h"

namespace reshard::nccl_test {
namespace {

TEST(Nccl, ExchangesBetweenSeveralRanksOnOneGpu) {
  const auto device = open_device("cuda", 0);
  if (!device) GTEST_SKIP() << device.error().message();
  const auto id = make_nccl_id();
  if (!id) GTEST_SKIP() << id.error().message();
  for (int n : {2, 4, 8}) {
    const Status status = run_nccl_ranks_on_one_gpu(n, {}, [&](Transport& ranks) {
      EXPECT_TRUE(ranks.moves_device_memory());
      return check_exchange(**device, ranks, 11);
    });
    EXPECT_TRUE(status) << n << " ranks: " << status.error().message();
  }
}

TEST(Nccl, EndsAllRanksWhenOneFails) {
  const auto device = open_device("cuda", 0);
  if (!device) GTEST_SKIP() << device.error().message();
  const auto id = make_nccl_id();
  if (!id) GTEST_SKIP() << id.error().message();
  const Status status = run_nccl_ranks_on_one_gpu(3, {}, [&](Transport& ranks) -> Status {
    if (ranks.rank() == 1) return corrupt("a bad file");
    return check_exchange(**device, ranks, 12);
  });
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().message(), "a bad file");
}

TEST(Nccl, SaysWhyThereIsNone) {
  if (open_device("cuda", 0)) GTEST_SKIP() << "there is a GPU";
  const Status status = run_nccl_ranks_on_one_gpu(2, {}, [](Transport&) -> Status { return {}; });
  ASSERT_FALSE(status);
  EXPECT_TRUE(status.error().message().starts_with("nccl: ")) << status.error().message();
}

}  // namespace
}  // namespace reshard::nccl_test
