// SPDX-License-Identifier: Apache-2.0
// Tensors in torchao's Python classes, as torch saved them (tests/data/torchao/make.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::torchao_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

const std::string kData = RESHARD_TEST_DATA "/torchao/";

// Returns 0, 1, 2, ... in the order of `at`, a function from row-major position to number.
template <class T, class At>
std::string numbers(Index count, At at) {
  std::string out;
  for (Index i = 0; i < count; ++i) {
    const auto wide = static_cast<float>(at(i));
    T stored;
    if constexpr (sizeof(T) == sizeof(float)) {
      stored = wide;
    } else {
      std::uint32_t bits;
      std::memcpy(&bits, &wide, sizeof bits);
      stored = static_cast<T>(bits >> 16);  // bfloat16, exact up to 255
    }
    out.append(reinterpret_cast<const char*>(&stored), sizeof stored);
  }
  return out;
}

TensorValues expected(const std::string& prefix) {
  const auto same = [](Index i) { return i; };
  const auto transposed = [](Index i) { return i % 4 * 6 + i / 4; };
  return {{prefix + "experts", {DType::kFloat32, {2, 3, 4}, numbers<float>(24, same)}},
          {prefix + "float8", {DType::kBFloat16, {6, 4}, numbers<std::uint16_t>(24, transposed)}},
          {prefix + "int8", {DType::kBFloat16, {4, 6}, numbers<std::uint16_t>(24, same)}}};
}

TEST(TorchAo, WeightsInClassesThatChangeOnlyTheirProductsAreRead) {
  EXPECT_EQ(load_checkpoint(kData + "weights.pt"), expected(""));
  const TempDir dir;
  for (const std::string source : {"dcp", "run.pt"}) {
    const CommandResult r = reshard_cli(
        {"convert", kData + source, dir / source, "--to", "hf", "--family", "none", "--part", "model", "-q"});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    const TensorValues got = load_checkpoint(dir / source);
    EXPECT_TRUE(got == expected("") || got == expected("model.")) << source;
  }
}

TEST(TorchAo, MomentsOfEightBitsDoNotHideTheModelAndAreNotCalledDamaged) {
  const TempDir dir;
  for (const std::string source : {"dcp", "run.pt"}) {
    SCOPED_TRACE(source);
    const CommandResult seen = reshard_cli({"inspect", kData + source, "--filter", "*"});
    EXPECT_EQ(seen.exit_code, 0) << seen.err;
    EXPECT_THAT(seen.out, HasSubstr("exp_avg"));
    const CommandResult checked = reshard_cli({"verify", kData + source});
    EXPECT_EQ(checked.exit_code, 1) << checked.err;
    EXPECT_THAT(checked.out, AllOf(HasSubstr("OptimState8bit from 'codes', 'scale', 'qmap'"),
                                   HasSubstr("a form that reshard does not read"), HasSubstr("0 errors, 1 warning"),
                                   HasSubstr("readable data read"), Not(HasSubstr("damaged"))));
    const CommandResult all = reshard_cli({"convert", kData + source, dir / "all", "--to", "dcp"});
    EXPECT_EQ(all.exit_code, 4);
    EXPECT_THAT(all.err, AllOf(HasSubstr("exp_avg"), HasSubstr("OptimState8bit"), HasSubstr("--exclude or --part")));
    const CommandResult rest =
        reshard_cli({"convert", kData + source, dir / source, "--to", "dcp", "--exclude", "*exp_avg"});
    EXPECT_EQ(rest.exit_code, 0) << rest.err;
  }
}

// The bytes of the other tensors are checked as before.
TEST(TorchAo, DamageBesideMomentsOfEightBitsIsFound) {
  const TempDir dir;
  std::string bytes = read_file(kData + "run.pt");
  const std::string row = numbers<float>(24, [](Index i) { return i; });
  const std::size_t at = bytes.find(row);
  ASSERT_NE(at, std::string::npos);
  bytes[at + 4] = static_cast<char>(bytes[at + 4] ^ 1);
  const CommandResult r = reshard_cli({"verify", dir.write("run.pt", bytes)});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_THAT(r.out, AllOf(HasSubstr("CRC-32"), HasSubstr("experts"), HasSubstr("1 error")));
}

}  // namespace
}  // namespace reshard::torchao_test
