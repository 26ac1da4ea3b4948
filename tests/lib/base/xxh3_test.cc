// SPDX-License-Identifier: Apache-2.0
// Tests the checksum XXH3 against what Python's xxhash computes of the same bytes, for each kind of length.
#include "lib/base/xxh3.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

namespace reshard::xxh3_test {
namespace {

TEST(Xxh3, IsThatOfTheLibraryForEveryKindOfLength) {
  std::vector<std::byte> bytes(5000);
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>((static_cast<std::uint32_t>(i) * 2654435761u) >> 13);
  // xxhash.xxh3_128(bytes[:n]).hexdigest()
  const std::map<std::size_t, std::string> expected = {
      {0, "99aa06d3014798d86001c324468d497f"},    {1, "a6cd5e9392000f6ac44bdff4074eecdb"},
      {3, "95c705060a313bf8a1c4a8259b827291"},    {4, "afbf64f9281b8de2fde8d93ae8794d8e"},
      {8, "2761698c33953c430234362aaf47b71a"},    {9, "0d39db6431d37a74895c8a562da51412"},
      {16, "29be75b0bbbb5284aafffcec5df2cb27"},   {17, "db7e8f77961e47fd878751509ecfdb8b"},
      {128, "ba44fd018231af4cbbe087d879edcc78"},  {129, "522c922743fd67f1b8075934107218e5"},
      {240, "4f49ccc8526aa7ad407883ea5ef95b9a"},  {241, "50b62ee1ee6455a7bc424a2c480dd281"},
      {256, "20d618055259b36c2d040b1ab40f0d78"},  {1024, "53bd178b75ab292e1fd15e7d36f5e1bc"},
      {1025, "d1ad5f4a3cce4374fe08e5a874d23fd2"}, {1088, "9c1e8a4061056e7d0ac7cf3a6009bab5"},
      {2049, "3b45eb7c64d498329156a1fd2d1a8c37"}, {4999, "fc080c6572eea5021933f07d27f01f6e"},
  };
  for (const auto& [n, hex] : expected)
    for (const std::size_t step : {std::size_t{37}, std::size_t{64}, std::size_t{5000}}) {
      Xxh3 sum;
      for (std::size_t at = 0; at < n; at += step) sum.update({bytes.data() + at, std::min(step, n - at)});
      EXPECT_EQ(sum.hex(), hex) << n << " bytes, " << step << " at a time";
    }
}

}  // namespace
}  // namespace reshard::xxh3_test
