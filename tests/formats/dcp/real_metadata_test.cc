// Tests parsing of the `.metadata` of real checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lib/base/json.h"
#include "tests/formats/dcp/metadata_cases.h"

namespace reshard::real_metadata_test {
namespace {

using namespace metadata_cases;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;
using testing::UnorderedElementsAreArray;

std::string small(const std::string& name) { return std::string(RESHARD_TEST_DATA) + "/dcp_small/" + name; }

// expected.json contains torch's own names, dtypes and shapes.
TEST(DcpMetadata, RealCheckpointsHaveTorchsNamesTypesAndShapes) {
  std::vector<std::pair<std::string, std::string>> checkpoints;
  for (const std::string name : {"ck1", "ck2", "ck4", "ck4low", "ckf_fsdp", "ckf_fsdptp", "ckf_hsdp", "ckz"})
    checkpoints.emplace_back(small(name), small("expected/" + name + ".json"));
  for (const std::string name : {"fsdp8", "fsdp2_tp2_optim"})
    checkpoints.emplace_back(sample(name) + "/checkpoint", sample(name) + "/expected.json");
  for (const auto& [path, truth] : checkpoints) {
    SCOPED_TRACE(path);
    const auto reader = open(path);
    ASSERT_TRUE(reader) << reader.error().message();
    const Json json = *parse_json(read_file(truth), truth);
    std::vector<std::string> expected;
    const std::span<const Json::Member> members = *json.as_object();
    for (const Json::Member& m : members) {
      Dims shape;
      const std::span<const Json> extents = *m.value.get_array("shape");
      for (const Json& n : extents) shape.push_back(*n.as_index());
      expected.push_back(m.key + " " + std::string(*m.value.get_string("dtype")) + " " + to_string(shape));
    }
    EXPECT_THAT(tensors_of((*reader)->catalog()), UnorderedElementsAreArray(expected));
  }
}

TEST(DcpMetadata, SaysWhereEachItemOfARealCheckpointLies) {
  const auto reader = open(small("ck2"));
  ASSERT_TRUE(reader) << reader.error().message();
  const Catalog& catalog = (*reader)->catalog();
  EXPECT_THAT(tensors_of(catalog), ElementsAre("v bfloat16 [2, 3]", "w bfloat16 [2, 3]"));
  EXPECT_THAT(shown(catalog, catalog.tensors()[0].fragments),
              ElementsAre("[0:2, 0:3] in __0_0.distcp at 2044, 1180 bytes"));
  EXPECT_THAT(shown(catalog, catalog.tensors()[1].fragments),
              ElementsAre("[0:2, 0:3] in __0_0.distcp at 864, 1180 bytes"));
  EXPECT_THAT(blobs_of(catalog), ElementsAre("n.s in __0_0.distcp at 0, 864 bytes"));
  EXPECT_EQ(shown(catalog.blobs[0].path), "/n/s");
  EXPECT_EQ(shown(catalog.tensors()[0].path), "/v");
  EXPECT_FALSE(catalog.tensors()[0].located);  // items are known, their contents are not yet
  EXPECT_THAT(catalog.attributes,
              ElementsAre(Pair("format", "PyTorch DCP"), Pair("torch", "2.4 or later"), Pair("python", "3.13")));
  EXPECT_THAT(catalog.warnings, IsEmpty());
}

// Chunks are in the order in which ranks planned them. A rank without rows has an empty chunk with an item.
TEST(DcpMetadata, KeepsTheOrderOfChunksOfARealCheckpoint) {
  const auto reader = open(small("ck4"));
  ASSERT_TRUE(reader) << reader.error().message();
  const Catalog& catalog = (*reader)->catalog();
  const auto fragments = [&](std::string_view name) {
    return shown(catalog, catalog.tensors()[*catalog.find(name)].fragments);
  };
  EXPECT_THAT(fragments("colw"), ElementsAre("[0:2, 0:8] in __0_0.distcp at 4404, 1244 bytes",  //
                                             "[4:6, 0:8] in __1_0.distcp at 5268, 1244 bytes",
                                             "[2:4, 0:8] in __2_0.distcp at 6764, 1244 bytes",
                                             "[6:8, 0:8] in __3_0.distcp at 8680, 1244 bytes"));
  EXPECT_THAT(
      fragments("uneven5"),
      ElementsAre("[0:2, 0:2] in __0_0.distcp at 2044, 1180 bytes", "[2:4, 0:2] in __1_0.distcp at 2908, 1180 bytes",
                  "[4:5, 0:2] in __2_0.distcp at 2044, 1180 bytes", "[5:5, 0:2] in __3_0.distcp at 2908, 1116 bytes"));
  EXPECT_THAT(fragments("empty_t"), ElementsAre("[0:0, 0:3] in __1_0.distcp at 10180, 1116 bytes"));
  EXPECT_THAT(fragments("scalar"), ElementsAre("[] in __3_0.distcp at 13592, 1180 bytes"));
  EXPECT_THAT(fragments("hsdpb"), ElementsAre("[0:1, 0:2] in __2_0.distcp at 4404, 1180 bytes",
                                              "[1:2, 0:2] in __3_0.distcp at 6320, 1180 bytes"));
}

TEST(DcpMetadata, KeepsTheKeyPathsOfARealCheckpoint) {
  const auto reader = open(small("ck1"));
  ASSERT_TRUE(reader) << reader.error().message();
  const Catalog& catalog = (*reader)->catalog();
  EXPECT_EQ(catalog.tensors().size(), 19u);
  EXPECT_EQ(catalog.blobs.size(), 18u);
  std::map<std::string, std::string> paths;
  for (const Tensor& t : catalog.tensors()) paths[t.name] = shown(t.path);
  for (const Blob& b : catalog.blobs) paths[b.name] = shown(b.path);
  EXPECT_EQ(paths["model.weight"], "/model/weight");
  EXPECT_EQ(paths["optimizer.state.0.exp_avg"], "/optimizer/state/0/exp_avg");       // the key of a dict
  EXPECT_EQ(paths["optimizer.param_groups.0.lr"], "/optimizer/param_groups[0]/lr");  // the position in a list
  EXPECT_EQ(paths["lst.0"], "/lst[0]");
  EXPECT_EQ(paths["lst.1.a"], "/lst[1]/a");
}

TEST(DcpMetadata, TellsTheVersionsOfARealCheckpoint) {
  const auto newer = open(small("wt"));
  ASSERT_TRUE(newer) << newer.error().message();
  EXPECT_EQ(attribute((*newer)->catalog(), "torch"), "2.9 or later");
  EXPECT_EQ(attribute((*newer)->catalog(), "python"), "");  // protocol 2: not torch's own pickler
  for (const std::string name : {"tp8", "fsdp16", "hsdp2x4", "fsdp4_tp2", "pp2_tp4", "single"}) {
    const auto older = open(sample(name) + "/checkpoint");
    ASSERT_TRUE(older) << older.error().message();
    EXPECT_EQ(attribute((*older)->catalog(), "torch"), "2.4 or later") << name;
    EXPECT_EQ(attribute((*older)->catalog(), "python"), "3.13") << name;
  }
}

// A save of eight ranks with 129 items: every box is stored once, by the rank whose file holds it.
TEST(DcpMetadata, ReadsPipelineStagesOfARealCheckpoint) {
  const auto reader = open(sample("pp2_tp4") + "/checkpoint");
  ASSERT_TRUE(reader) << reader.error().message();
  const Catalog& catalog = (*reader)->catalog();
  EXPECT_EQ(catalog.tensors().size(), 39u);
  std::size_t items = 0;
  for (const Tensor& t : catalog.tensors()) {
    items += t.fragments.size();
    EXPECT_TRUE(t.replicas.empty());
    for (std::size_t i = 0; i < t.fragments.size(); ++i) {
      const std::string& file = catalog.files[t.fragments.extent(i).file].path;
      if (t.name.starts_with("layers.0.")) {
        EXPECT_LT(file, "__4_0.distcp") << t.name;
      }
      if (t.name.starts_with("layers.3.")) {
        EXPECT_GE(file, "__4_0.distcp") << t.name;
      }
    }
  }
  EXPECT_EQ(items, 129u);
}

}  // namespace
}  // namespace reshard::real_metadata_test
