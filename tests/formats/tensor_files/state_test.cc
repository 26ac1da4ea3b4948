// Tests what formats of named tensors share, apart from the tensors: the index of several files, placeholders, values
// of ranks, Adam's state and the lists of its parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/encoding/torch_archive.h"
#include "formats/tensor_files/adam_state.h"
#include "formats/tensor_files/indexed_files.h"
#include "formats/tensor_files/parameter_lists.h"
#include "formats/tensor_files/placeholders.h"
#include "formats/tensor_files/rank_values.h"
#include "tests/support/pickle_values.h"
#include "tests/support/temp_dir.h"

namespace reshard::state_test {
namespace {

using pickled::number;
using testing::ElementsAre;
using testing::HasSubstr;

Tensor tensor(const std::string& name, const Dims& shape) {
  Tensor out;
  out.name = name;
  out.dtype = DType::kFloat32;
  out.shape = shape;
  out.fragments = FragmentList(shape.rank());
  if (volume(shape) > 0) out.fragments.add(whole(shape), {0, 0, volume(shape) * 4});
  return out;
}

// ---- the index

TEST(IndexedFiles, KnowWhatIsStaleMissingAndTooMuch) {
  const TempDir dir;
  dir.write("i.json", R"({"metadata": {"total_size": 8}, "weight_map": {"a": "1.bin", "b": "2.bin"}})");
  auto files = IndexedFiles::open(dir.path(), "i.json");
  ASSERT_TRUE(files) << files.error().message();
  EXPECT_THAT(files->files(), ElementsAre("1.bin", "2.bin"));
  EXPECT_TRUE(files->contains("2.bin"));
  EXPECT_FALSE(files->contains("3.bin"));
  EXPECT_TRUE(files->is_wanted("a", "1.bin"));
  EXPECT_FALSE(files->is_wanted("a", "2.bin")) << "a stale copy";
  EXPECT_TRUE(files->is_wanted("a", "2.bin", true)) << "a piece may be in any file";
  EXPECT_TRUE(files->is_wanted("c", "2.bin")) << "loaders read it";
  Catalog catalog;
  catalog.root = dir.path();
  EXPECT_THAT(files->absent(), ElementsAre(testing::Pair("2.bin", ElementsAre("b"))));
  EXPECT_EQ(files->other_file({"b"}), "");
  EXPECT_FALSE(files->is_wanted("b", "1.bin"));
  EXPECT_EQ(files->other_file({"b"}), "1.bin");
  EXPECT_EQ(files->other_file({"b", "c"}), "") << "c is not elsewhere";
  EXPECT_TRUE(files->is_wanted("b", "2.bin"));
  EXPECT_THAT(files->absent(), testing::IsEmpty());
  files->describe(catalog);
  EXPECT_THAT(catalog.warnings, ElementsAre(HasSubstr("not in the index: 1 tensor: 'c'"),
                                            HasSubstr("other than the index says: 2 tensors: 'a', 'b'"),
                                            HasSubstr("total_size of 8; the tensors have 0 bytes")));
}

// ---- placeholders

TEST(Placeholders, AreRefusedIfMostWeightsAre) {
  const TempDir dir;
  dir.write("m/model.safetensors", "");
  dir.write("global_step9/x", "");
  dir.write("global_step10/x", "");
  const auto place = PathSnapshot::look(dir / "m");
  ASSERT_TRUE(place);
  Catalog catalog;
  ASSERT_TRUE(catalog.add(tensor("a.weight", {0})));
  ASSERT_TRUE(catalog.add(tensor("b.weight", {2})));
  ASSERT_TRUE(catalog.add(tensor("c.bias", {0})));
  EXPECT_TRUE(refuse_placeholders(catalog, *place)) << "half of the weights";
  ASSERT_TRUE(catalog.add(tensor("d.weight", {0})));
  const Status refused = refuse_placeholders(catalog, *place);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnsupported);
  EXPECT_THAT(refused.error().message(), HasSubstr("2 of 3 weights"));
  EXPECT_THAT(refused.error().message(), HasSubstr("global_step10; open that")) << "the last step";
}

// ---- values of ranks

TEST(RankValues, EqualOnesAreStoredOnce) {
  RankValues values;
  for (std::uint32_t file = 0; file < 3; ++file) {
    const auto document = pickle::parse(pickled::bytes_of(pickled::integer(file == 2 ? 7 : 5)), "x");
    ASSERT_TRUE(document);
    EXPECT_TRUE(values.add(file, {"step"}, document->root()));
    EXPECT_EQ(values.is_alike(), file < 2);
  }
  EXPECT_EQ(values.pickles.size(), 2u);
  EXPECT_THAT(values.holders, ElementsAre(testing::Pair(0u, 0u), testing::Pair(1u, 0u), testing::Pair(2u, 1u)));
  const auto code = pickle::parse(pickled::bytes_of(pickled::global("os", "system")), "x");
  ASSERT_TRUE(code);
  EXPECT_FALSE(values.add(3, {"step"}, code->root())) << "is no plain data";
  EXPECT_EQ(values.holders.size(), 3u);
}

// ---- Adam

TargetBlob blob(const std::string& name, const pickled::Value& value) {
  return {name, {name}, torch_archive::object_item(pickled::bytes_of(value))};
}

std::vector<TargetBlob> hyperparameters() {
  const std::string group = "optimizer.param_groups.0.";
  return {blob(group + "lr", number(0.5)), blob(group + "betas", pickled::tuple({number(0.9), number(0.95)})),
          blob(group + "eps", number(1e-8)), blob(group + "weight_decay", number(0.1)),
          blob("extra_state.tokens", pickled::integer(12))};
}

TEST(AdamState, IsCompleteOrRefused) {
  LayoutRequest request;
  const auto add = [&](const std::string& name) {
    request.tensors.push_back({name, DType::kFloat32, {2}, {name}, {}});
  };
  add("w");
  EXPECT_EQ(*has_adam(request, "X"), false);
  for (const char* const state : {"exp_avg", "exp_avg_sq"}) add("optimizer.state.w." + std::string(state));
  const auto partial = has_adam(request, "X");
  ASSERT_FALSE(partial.has_value());
  EXPECT_THAT(partial.error().message(), HasSubstr("no moments, or no master, of 'w'"));
}

TEST(AdamState, ComesFromTheGroupThatDecays) {
  std::vector<TargetBlob> blobs = hyperparameters();
  blobs.push_back(blob("optimizer.param_groups.1.weight_decay", number(0)));
  const auto objects = AdamObjects::read(blobs, 3, "X");
  ASSERT_TRUE(objects) << objects.error().message();
  EXPECT_EQ(objects->step(), 3);
  EXPECT_EQ(objects->number("weight_decay"), 0.1);
  EXPECT_EQ(objects->count("tokens"), 12);
  EXPECT_EQ(objects->count("none"), std::nullopt);
  EXPECT_EQ(objects->groups().size(), 2u);
}

TEST(AdamState, NeedsAStepAndHyperparameters) {
  std::vector<TargetBlob> blobs = hyperparameters();
  EXPECT_THAT(AdamObjects::read(blobs, std::nullopt, "X").error().message(),
              HasSubstr("does not record how many steps"));
  blobs.erase(blobs.begin());
  EXPECT_THAT(AdamObjects::read(blobs, 3, "X").error().message(), HasSubstr("groups have no lr"));
  for (TargetBlob& b : blobs) b.bytes.assign(b.bytes.size(), '\0');  // when planning without data
  EXPECT_TRUE(AdamObjects::read(blobs, std::nullopt, "X"));
}

TEST(AdamState, HyperparametersAreKnownByTheirKeys) {
  EXPECT_TRUE(AdamObjects::is_hyperparameter("optimizer.param_groups.0.lr"));
  EXPECT_TRUE(AdamObjects::is_hyperparameter("optimizer.state.w.step"));
  EXPECT_FALSE(AdamObjects::is_hyperparameter("optimizer.state.w.exp_avg"));
  EXPECT_FALSE(AdamObjects::is_hyperparameter("lr_scheduler.last_epoch"));
}

TEST(ParameterLists, FollowTheNamesOfTheOutputOnce) {
  LayoutRequest request;
  const std::string list = torch_archive::object_item(pickled_names({"a", "b", "c"}));
  request.blobs = {{"optimizer.param_groups.0.params", {"params"}, list},
                   {"optimizer.param_groups.0.lr", {"lr"}, list}};
  request.renamed = [](const std::string& name) {
    return name == "c" ? std::vector<std::string>{"c1", "c2"} : std::vector<std::string>{"ab"};
  };
  ASSERT_TRUE(rename_parameter_lists(request));
  EXPECT_EQ(request.blobs[0].bytes, torch_archive::object_item(pickled_names({"ab", "c1", "c2"})));
  EXPECT_EQ(request.blobs[1].bytes, list) << "no list of parameters by its name";
  EXPECT_EQ(request.renamed, nullptr);
}

}  // namespace
}  // namespace reshard::state_test
