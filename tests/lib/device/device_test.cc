#include "lib/device/device.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/support/device_checks.h"

namespace reshard::device_test {
namespace {

// Checks the same facts for every device.
class EveryDevice : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto opened = open_device(GetParam(), 0);
    if (!opened && opened.error().code() == ErrorCode::kUnsupported) GTEST_SKIP() << opened.error().message();
    ASSERT_TRUE(opened) << opened.error().message();
    device_ = *std::move(opened);
  }
  void expect_holds(const Status& status) { EXPECT_TRUE(status) << status.error().message(); }

  std::unique_ptr<Device> device_;
};

TEST_P(EveryDevice, BringsBytesThereAndBack) { expect_holds(check_transfers(*device_, 1)); }
TEST_P(EveryDevice, CopiesBoxesAsDefined) { expect_holds(check_copies(*device_, 2)); }
TEST_P(EveryDevice, ConvertsAsDefined) { expect_holds(check_conversions(*device_, 3)); }
TEST_P(EveryDevice, DigestsAsDefined) { expect_holds(check_digests(*device_, 4)); }
TEST_P(EveryDevice, DoesWhatIsQueuedInOrder) { expect_holds(check_chains(*device_, 6)); }

TEST_P(EveryDevice, KeepsToItsCap) {
  const auto device = open_device(GetParam(), 10000);
  ASSERT_TRUE(device);
  auto most = (*device)->allocate(9000);
  ASSERT_TRUE(most);
  const auto more = (*device)->allocate(1001);
  ASSERT_FALSE(more);
  EXPECT_NE(
      more.error().message().find("expected at most 1.00 kB more of the 10.0 kB allowed, got a request for 1.00 kB"),
      std::string::npos)
      << more.error().message();
  EXPECT_TRUE((*device)->allocate(1000));
  *most = nullptr;
  EXPECT_TRUE((*device)->allocate(10000));
}

TEST_P(EveryDevice, SaysThatItHasNoSuchMemory) {
  const auto memory = device_->allocate(std::numeric_limits<Index>::max() / 2);
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().code(), ErrorCode::kIo);
  EXPECT_TRUE(device_->allocate(4096)) << "and goes on";
  EXPECT_FALSE(device_->allocate(-1));
}

INSTANTIATE_TEST_SUITE_P(Device, EveryDevice, testing::Values("cpu", "cuda"),
                         [](const auto& kind) { return std::string(kind.param); });

TEST(OpenDevice, KnowsTheCpu) {
  const auto device = open_device("cpu", 0);
  ASSERT_TRUE(device);
  EXPECT_EQ((*device)->name(), "cpu");
  EXPECT_TRUE((*device)->is_cpu());
  EXPECT_TRUE(cpu_device().is_cpu());
  EXPECT_TRUE(open_device("cpu:0", 0));
}

TEST(OpenDevice, TakesAGpuByItselfWhereThereIsOne) {
  const auto gpu = open_device("cuda", 0);
  const auto device = open_device("auto", 0);
  ASSERT_TRUE(device);
  EXPECT_EQ((*device)->is_cpu(), !gpu);
}

TEST(OpenDevice, SaysWhatItExpects) {
  const auto message = [](const std::string& name, Index cap = 0) {
    const auto device = open_device(name, cap);
    return device ? "" : device.error().message();
  };
  EXPECT_EQ(message("gpu"), "device: expected cpu, cuda, cuda:N or auto, got 'gpu'");
  EXPECT_EQ(message(""), "device: expected cpu, cuda, cuda:N or auto, got ''");
  EXPECT_EQ(message("auto:0"), "device: expected cpu, cuda, cuda:N or auto, got 'auto:0'");
  EXPECT_EQ(message("cpu:1"), "device: expected cpu:0, the only one, got cpu:1");
  EXPECT_EQ(message("cuda:"), "device: expected a number after 'cuda:', got ''");
  EXPECT_EQ(message("cuda:-1"), "device: expected a number after 'cuda:', got '-1'");
  EXPECT_EQ(message("cuda:99999999999"), "device: expected a number after 'cuda:', got '99999999999'");
  EXPECT_EQ(message("cpu", -1), "device: expected a memory cap of 0 bytes or more, got -1");
}

TEST(OpenDevice, SaysWhyThereIsNoGpu) {
  const auto device = open_device("cuda", 0);
  if (device) GTEST_SKIP() << "there is one";
  EXPECT_EQ(device.error().code(), ErrorCode::kUnsupported);
  const std::string& why = device.error().message();
  EXPECT_TRUE(why.starts_with("cuda: no GPU can be used: ") || why.find("was built without CUDA") != std::string::npos)
      << why;
}

}  // namespace
}  // namespace reshard::device_test
