#include "formats/dcp/metadata.h"

#include <gtest/gtest.h>

#include "formats/registry.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

TEST(DcpMetadataWriter, WritesMillionsOfValuesWithoutDeepStacks) {
  constexpr Index kPieces = 600'000;
  const TargetTensor tensor{"w", DType::kFloat32, {kPieces}, {"w"}, {}};
  dcp::WrittenEntry entry{&tensor, "w", {"w"}, {}};
  for (Index i = 0; i < kPieces; ++i) entry.items.push_back({Box{{i}, {1}}, 0, i * 512, 512});
  const TempDir dir;
  write_file(dir / ".metadata", dcp::write_metadata({entry}, {"__0_0.distcp"}));
  const auto open = open_checkpoint(dir.path(), {.files_too = false});
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_EQ(open->reader->catalog().tensors()[0].fragments.size(), static_cast<std::size_t>(kPieces));
}

}  // namespace
}  // namespace reshard
