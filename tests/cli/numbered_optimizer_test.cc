// torch's own optimizer files beside a model: their numbers name no parameter, but the shapes of their moments are the
// model's, or the file is not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

const std::string kData = RESHARD_TEST_DATA "/runs/numbered_optimizer/";

CommandResult verify(const std::string& path) {
  CommandResult r = reshard_cli({"verify", path, "--family", "none", "--fail-on", "warning"});
  for (std::size_t at; (at = r.out.find("\n          ")) != std::string::npos;) r.out.replace(at, 11, " ");
  return r;
}

TEST(NumberedOptimizer, OneRanksMomentsAreNotThoseOfTheModelBeside) {
  for (const char* file : {"optimizer.pt", "optimizer.bin"})
    for (const bool is_whole : {true, false}) {
      const TempDir dir;
      fs::copy(kData + "model.safetensors", dir / "model.safetensors");
      fs::copy(kData + (is_whole ? "whole.pt" : "one_of_two.pt"), dir / file);
      for (const std::string& path : {dir.path(), dir / file}) {
        const CommandResult r = verify(path);
        EXPECT_EQ(r.exit_code, is_whole ? 0 : 1) << path << r.out << r.err;
        if (is_whole) continue;
        EXPECT_THAT(r.out, HasSubstr("the moments of 3 parameters have shapes that "));
        EXPECT_THAT(r.out, HasSubstr("They are one of 2 parts"));
      }
    }
}

TEST(NumberedOptimizer, ByItselfOrDamagedItHasNothingToBeComparedWith) {
  const TempDir dir;
  fs::copy(kData + "one_of_two.pt", dir / "optimizer.pt");
  EXPECT_EQ(verify(dir / "optimizer.pt").exit_code, 0);
  fs::copy(kData + "model.safetensors", dir / "model.safetensors");
  fs::resize_file(dir / "optimizer.pt", 1000);
  EXPECT_THAT(verify(dir.path()).out, Not(HasSubstr("the moments of")));
}

// A model that trained in part has fewer moments than parameters.
TEST(NumberedOptimizer, OfAnotherModelItSaysSo) {
  const TempDir dir;
  fs::copy(kData + "whole.pt", dir / "optimizer.pt");
  write_dcp({{"w", {DType::kFloat32, {4, 4}, std::string(64, 'w')}}}, dir / "other", Mesh({{"dp_shard", 1}}));
  ASSERT_EQ(reshard_cli({"convert", dir / "other", dir / "model", "--to", "hf", "--family", "none", "-q"}).exit_code,
            0);
  fs::copy(dir / "optimizer.pt", dir / "model/optimizer.pt");
  const CommandResult r = verify(dir / "model");
  EXPECT_EQ(r.exit_code, 1) << r.out << r.err;
  EXPECT_THAT(r.out, HasSubstr("the moments of 7 parameters have shapes that "));
}

}  // namespace
}  // namespace reshard
