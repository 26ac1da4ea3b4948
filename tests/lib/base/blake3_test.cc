// SPDX-License-Identifier: Apache-2.0
// Tests BLAKE3 against what Python's blake3 computes of the same bytes, for each kind of length: of blocks, chunks and
// trees.
#include "lib/base/blake3.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

namespace reshard::blake3_test {
namespace {

TEST(Blake3, IsThatOfTheLibraryForEveryKindOfLength) {
  std::vector<std::byte> bytes(20000);
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>((static_cast<std::uint32_t>(i) * 2654435761u) >> 13);
  // blake3.blake3(bytes[:n]).hexdigest()
  const std::map<std::size_t, std::string> expected = {
      {0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"},
      {1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"},
      {63, "21d02e949a1c5ce41ae824518b029ba8445f478980c1e6d8d93d54c36d325567"},
      {64, "25a85b7347ed0e5334f25cf08633c7597a02a4fd3879dafe0c3236c92b5e6adb"},
      {65, "44bab39e0959b79d515411b212fd0852199765a1b226b0aacf19e9c4fc47ed77"},
      {1023, "e5c5abbd75861fc4aa11d2c30c0a34832c1103d99806fa7d35df80c88b709eaa"},
      {1024, "8214d8245d795aded8ff15199fcdd5369605c79a3b82792895f0362d24546bf8"},
      {1025, "7ace730fcc5ac742dc037096a911f88c9a77ae2959cc1b3a2b15922b1062d611"},
      {2048, "106ef4b2f37c3e0b9dcf17eab3fc7b6bb799671cefcc4561ca808f8fba1faefe"},
      {2049, "48b02b39c6056ee47a00bd400bbadac169db5d93fc5c12b96a9221cd7b69c2d3"},
      {3072, "dd6cf881216e4d7b014644a454a5ca25ee5b008e5794aa5689858b804cf8e357"},
      {3073, "9b1fc62ab2ac70c95412a0ff7857b15e59cccfa9bd3d479534e6fd90dabedecd"},
      {5120, "cd03ab0f5769d606cb1ab955a45c7e898a2c15ed082acdb4042711f3f8d3383d"},
      {8192, "ef6deaaa24079f19204bb2259b565fe2fd1b0636c64b0e8d6bd106ecdfa19c25"},
      {16385, "875a80882cdcfc9a23083e1bbd4a24c1ed580bef0fd6b5d887deb0fe2842b1bf"},
      {20000, "fe41afef9f1db58859e85d67f00b2b9f5cffbb7507e439dc2d3d0b0bf5f558e4"},
  };
  for (const auto& [n, hex] : expected)
    for (const std::size_t step :
         {std::size_t{37}, std::size_t{64}, std::size_t{1500}, std::size_t{9000}, std::size_t{20000}}) {
      Blake3 sum;
      for (std::size_t at = 0; at < n; at += step) sum.update({bytes.data() + at, std::min(step, n - at)});
      EXPECT_EQ(sum.hex(), hex) << n << " bytes, " << step << " at a time";
    }
}

}  // namespace
}  // namespace reshard::blake3_test
