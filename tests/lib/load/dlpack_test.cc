// Tests loads into tensors of other libraries.
#include "lib/load/dlpack.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "formats/load.h"
#include "formats/open.h"
#include "lib/device/convert.h"
#include "lib/load/exchange_schedule.h"
#include "lib/load/load.h"
#include "lib/transport/collectives.h"
#include "tests/lib/load/loads.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_ranks.h"
#include "tests/support/layouts.h"
#include "tests/support/local_ranks.h"
#include "tests/support/must.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::dlpack_test {
namespace {

using namespace loads;
using testing::HasSubstr;

TEST(Dlpack, EveryDtypeHasACodeOfItsOwn) {
  std::set<std::pair<int, int>> seen;
  for (int i = 0; i <= static_cast<int>(DType::kComplex128); ++i) {
    const auto dtype = static_cast<DType>(i);
    const dlpack::DLDataType type = dlpack::data_type(dtype);
    EXPECT_EQ(type.bits, 8 * byte_size(dtype));
    EXPECT_EQ(type.lanes, 1);
    EXPECT_TRUE(seen.emplace(type.code, type.bits).second) << info(dtype).torch_name;
  }
  EXPECT_EQ(dlpack::data_type(DType::kBFloat16), (dlpack::DLDataType{4, 16, 1}));
  EXPECT_EQ(dlpack::data_type(DType::kFloat8E4M3), (dlpack::DLDataType{10, 8, 1}));
}

TEST(Dlpack, LoadsIntoATensorOfSomebodyElses) {
  const TensorValue expected =
      part_of(load_checkpoint(sample("tp8") + "/full.safetensors").at("layers.0.attention.wo.weight"),
              "layers.0.attention.wo.weight", must(Mesh::parse("tp=2")), 1);
  LoadOptions options = options_for("tp=2", 1);
  options.selection.include = {"layers.0.attention.wo.weight"};
  const OpenLoad open = must(open_load(sample_checkpoint("tp8"), options));
  const LoadTensor& t = open.load->tensors()[0];
  ASSERT_EQ(t.shape, (Dims{64, 32}));
  std::string memory(64 * 40 * 2 + 6, '\xA5');
  std::int64_t shape[] = {64, 32}, strides[] = {40, 1};
  const dlpack::DLTensor theirs = {memory.data(), {}, 2, {dlpack::kBfloat, 16, 1}, shape, strides, 6};
  const Destination to = must(dlpack::destination(theirs, t, cpu_device()));
  ASSERT_TRUE(open.load->run({{to}}));
  for (std::size_t row = 0; row < 64; ++row) {
    EXPECT_EQ(memory.substr(6 + row * 80, 64), expected.bytes.substr(row * 64, 64)) << row;
    EXPECT_EQ(memory.substr(6 + row * 80 + 64, 16), std::string(16, '\xA5')) << row;
  }
  const dlpack::TensorView view(t, to, {});
  EXPECT_EQ(view.tensor().data, memory.data() + 6);
  EXPECT_EQ(view.tensor().ndim, 2);
  EXPECT_EQ(view.tensor().shape[1], 32);
  EXPECT_EQ(view.tensor().strides[0], 40);
}

TEST(Dlpack, AHandedOverTensorKeepsItsMemoryUntilItIsDeleted) {
  const LoadTensor t{"w", DType::kFloat32, {2, 3}, {2, 3}, {}};
  auto memory = std::make_shared<std::vector<std::byte>>(24);
  const std::weak_ptr<std::vector<std::byte>> watched = memory;
  dlpack::DLManagedTensor* out = dlpack::managed(t, {memory->data(), std::nullopt}, {}, memory);
  memory.reset();
  ASSERT_FALSE(watched.expired());
  EXPECT_EQ(out->dl_tensor.data, watched.lock()->data());
  EXPECT_EQ(out->dl_tensor.strides[0], 3);
  out->deleter(out);
  EXPECT_TRUE(watched.expired());
}

TEST(Dlpack, RefusesATensorThatIsNotTheOne) {
  const LoadTensor t{"w", DType::kBFloat16, {2, 3}, {2, 3}, {}};
  std::byte memory[12];
  std::int64_t shape[] = {2, 3}, other[] = {3, 2};
  const dlpack::DLTensor good = {memory, {}, 2, {dlpack::kBfloat, 16, 1}, shape, nullptr, 0};
  const auto refused = [&](const dlpack::DLTensor& tensor) {
    const auto to = dlpack::destination(tensor, t, cpu_device());
    return to ? "accepted" : to.error().message();
  };
  EXPECT_EQ(refused(good), "accepted");
  dlpack::DLTensor bad = good;
  bad.device.device_type = dlpack::kCuda;
  EXPECT_EQ(refused(bad), "DLTensor for 'w': device: expected memory of cpu, got device type 2, number 0");
  bad = good;
  bad.dtype.code = dlpack::kFloat;
  EXPECT_EQ(
      refused(bad),
      "DLTensor for 'w': dtype: expected bfloat16 (type code 4 of 16 bits and 1 lane), got type code 2 of 16 bits "
      "and 1 lane");
  bad = good;
  bad.ndim = 1;
  EXPECT_EQ(refused(bad), "DLTensor for 'w': dimensions: expected 2, got 1");
  bad = good;
  bad.shape = other;
  EXPECT_EQ(refused(bad), "DLTensor for 'w': shape: expected [2, 3], got [3, 2]");
}

}  // namespace
}  // namespace reshard::dlpack_test
