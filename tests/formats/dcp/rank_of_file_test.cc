#include <gtest/gtest.h>

#include "formats/dcp/metadata.h"

namespace reshard::dcp::rank_of_file_test {
namespace {

TEST(DcpRankOfFile, IsTheFirstNumberOfItsName) {
  EXPECT_EQ(rank_of_file("__12_0.distcp"), 12);
  EXPECT_EQ(rank_of_file("deep/__3_7.distcp"), 3);
  for (const char* name :
       {"", "__.distcp", "__1.distcp", "__1_.distcp", "__-1_0.distcp", "__1_-1.distcp", "__1_0.distcp.tmp",
        "__99999999999999999999_0.distcp", "model.safetensors", "hint__1_0.distcp"})
    EXPECT_EQ(rank_of_file(name), -1) << name;
}

}  // namespace
}  // namespace reshard::dcp::rank_of_file_test
