#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/colossalai/colossalai.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::colossalai_target_test {
namespace {

using testing::ElementsAre;

TargetTensor wanted(const std::string& name, const Dims& shape, Index stage = -1) {
  TargetTensor t;
  t.name = name;
  t.dtype = DType::kUint8;
  t.shape = shape;
  t.placement = Placement{{}, stage};
  return t;
}

TensorValues zeros(const LayoutRequest& request) {
  TensorValues out;
  for (const TargetTensor& t : request.tensors)
    out[t.name] = {t.dtype, t.shape, std::string(static_cast<std::size_t>(volume(t.shape)), '\0')};
  return out;
}

std::vector<std::string> paths(const Target& target) {
  std::vector<std::string> out;
  for (const CatalogFile& f : target.catalog().files) out.push_back(f.path);
  return out;
}

TEST(ColossalaiWrite, FilesAlwaysHaveACounterAndTheIndexCountsMiB) {
  const TempDir dir;
  LayoutRequest request;
  request.tensors = {wanted("z", {512, 1024}), wanted("a", {1024, 1024})};
  const auto target = kColossalaiFormat.lay_out(request);
  ASSERT_TRUE(target) << target.error().message();
  EXPECT_THAT(paths(**target), ElementsAre("model-00001.safetensors", "model.safetensors.index.json"));
  write_target(zeros(request), **target, dir / "out");
  EXPECT_EQ(read_file(dir / "out/model.safetensors.index.json"), R"({
  "metadata": {
    "total_size": 1.5
  },
  "weight_map": {
    "z": "model-00001.safetensors",
    "a": "model-00001.safetensors"
  }
}
)");
}

TEST(ColossalaiWrite, WholeMiBAreFloatsToo) {
  const TempDir dir;
  LayoutRequest request;
  request.tensors = {wanted("w", {2, 1024, 1024})};
  request.container = Container::kTorchSave;
  const auto target = kColossalaiFormat.lay_out(request);
  ASSERT_TRUE(target) << target.error().message();
  EXPECT_THAT(paths(**target), ElementsAre("pytorch_model-00001.bin", "pytorch_model.bin.index.json"));
  write_target(zeros(request), **target, dir / "out");
  EXPECT_THAT(read_file(dir / "out/pytorch_model.bin.index.json"), testing::HasSubstr("\"total_size\": 2.0\n"));
}

TEST(ColossalaiWrite, StagesAreCutByThemselves) {
  LayoutRequest request;
  request.mesh = Mesh({{"pp", 3}});
  request.tensors = {wanted("embed", {8}, 0), wanted("layers.0", {8}, 0), wanted("head", {4}, 2)};
  request.max_file_bytes = 10;
  const auto target = kColossalaiFormat.lay_out(request);
  ASSERT_TRUE(target) << target.error().message();
  EXPECT_THAT(paths(**target),
              ElementsAre("model-stage-00001-shard-00001.safetensors", "model-stage-00001-shard-00002.safetensors",
                          "model-stage-00002-shard-00001.safetensors",  // of a stage without tensors
                          "model-stage-00003-shard-00001.safetensors", "model.safetensors.index.json"));
  EXPECT_TRUE(validate((*target)->catalog()));
}

TEST(ColossalaiWrite, RefusesAxesThatItsLoaderCutsAlong) {
  LayoutRequest request;
  request.mesh = Mesh({{"pp", 2}, {"tp", 4}});
  const auto target = kColossalaiFormat.lay_out(request);
  ASSERT_FALSE(target);
  EXPECT_EQ(target.error().message(),
            "ColossalAI checkpoints hold whole tensors, which its loader cuts for each rank: expected a mesh of "
            "pipeline stages alone (pp=2), got pp=2, tp=4");
}

}  // namespace
}  // namespace reshard::colossalai_target_test
