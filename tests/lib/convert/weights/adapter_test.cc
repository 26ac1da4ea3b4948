// Tests finding adapters, checking them against their config and model, and merging them.
#include "lib/convert/weights/adapter.h"

#include <gmock/gmock.h>

#include "tests/support/conversion_steps.h"
#include "tests/support/made_checkpoint.h"
#include "tests/support/temp_dir.h"

namespace reshard::adapter_test {
namespace {

using testing::HasSubstr;

const std::string kModule = "model.layers.0.self_attn.q_proj", kWeight = kModule + ".weight";
const std::string kA = "base_model.model." + kModule + ".lora_A.weight",
                  kB = "base_model.model." + kModule + ".lora_B.weight";

// A model with one weight [3, 2], and an adapter of rank 1 stored separately.
class AnAdapter : public testing::Test {
 protected:
  AnAdapter() {
    model_.add(kWeight, {3, 2}, {1, 2, 3, 4, 5, 6});
    model_.write();
    names_ = translated(model_.catalog(), kModels);
    view_ = {model_.catalog(), {}};
  }
  void add(const std::string& name, const Dims& shape, const std::vector<float>& values) {
    adapter_.add(name, shape, values);
    adapter_.catalog().tensor(adapter_.catalog().tensors().size() - 1).plain_key = "peft_adapter." + name;
  }
  void add_pair() {
    add(kA, {1, 2}, {1, 10});
    add(kB, {3, 1}, {1, 2, 3});
  }
  void write_config(const std::string& text) { dir_.write("adapter_config.json", text); }
  Result<std::optional<Adapter>> read(AdapterUse use, std::optional<double> alpha = std::nullopt) {
    adapter_.write();
    return read_adapter(model_, {&adapter_, alpha}, use, selection_, view_, names_);
  }
  std::string error(AdapterUse use = AdapterUse::kMerged, std::optional<double> alpha = std::nullopt) {
    return error_of(read(use, alpha));
  }

  TempDir dir_;
  MadeCheckpoint model_{dir_.path(), "model"}, adapter_{dir_.path(), "adapter"};
  Selection selection_;
  Translation names_;
  SourceView view_;
};

TEST_F(AnAdapter, IsAddedToItsWeight) {
  write_config(R"({"r": 1, "lora_alpha": 2})");
  add_pair();
  const Adapter adapter = must(read(AdapterUse::kMerged)).value();
  ASSERT_EQ(adapter.added.size(), 1U);
  EXPECT_EQ(adapter.added[0].rank, 1);
  EXPECT_EQ(adapter.added[0].scaling, 2);
  FileSource stored(view_.catalog, model_.files()), operands(adapter_.catalog(), adapter_.files());
  ComputedSource merged(view_.catalog, stored);
  merge_adapter(adapter, stored, operands, merged);
  // weight + 2 x b a
  EXPECT_EQ(floats_of(merged, kWeight), (std::vector<float>{3, 22, 7, 44, 11, 66}));
}

// Covers modules_to_save, and biases of layers that the adapter changes.
TEST_F(AnAdapter, ReplacesWeightsThatItHasWhole) {
  write_config(R"({"r": 1, "lora_alpha": 2})");
  const std::string bias = kModule + ".bias";
  model_.add("lm_head.weight", {2, 2}, {1, 2, 3, 4});
  model_.add(bias, {3}, {1, 2, 3});
  model_.write();
  view_ = {model_.catalog(), {}};
  names_.model.config.reset();  // the config ties the head
  add_pair();
  add("base_model.model.lm_head.weight", {2, 2}, {5, 6, 7, 8});
  add("base_model.model." + kModule + ".base_layer.bias", {3}, {4, 5, 6});
  const Adapter adapter = must(read(AdapterUse::kMerged)).value();
  EXPECT_THAT(adapter.operands(), testing::ElementsAre(0, 1, 2, 3));
  FileSource stored(view_.catalog, model_.files()), operands(adapter_.catalog(), adapter_.files());
  ComputedSource merged(view_.catalog, stored);
  merge_adapter(adapter, stored, operands, merged);
  EXPECT_EQ(floats_of(merged, kWeight), (std::vector<float>{3, 22, 7, 44, 11, 66}));
  EXPECT_EQ(floats_of(merged, "lm_head.weight"), (std::vector<float>{5, 6, 7, 8}));
  EXPECT_EQ(floats_of(merged, bias), (std::vector<float>{4, 5, 6}));
}

// An embedding that was resized and is trained by a pair: PEFT saves both.
TEST_F(AnAdapter, IsAddedToTheWeightThatLiesBesideIt) {
  write_config(R"({"r": 1, "lora_alpha": 2})");
  add_pair();
  add("base_model.model." + kModule + ".base_layer.weight", {3, 2}, {10, 20, 30, 40, 50, 60});
  const Adapter adapter = must(read(AdapterUse::kMerged)).value();
  EXPECT_TRUE(adapter.replaced.empty());
  EXPECT_THAT(adapter.operands(), testing::ElementsAre(0, 1, 2));
  FileSource stored(view_.catalog, model_.files()), operands(adapter_.catalog(), adapter_.files());
  ComputedSource merged(view_.catalog, stored);
  merge_adapter(adapter, stored, operands, merged);
  EXPECT_EQ(floats_of(merged, kWeight), (std::vector<float>{12, 40, 34, 80, 56, 120}));
}

TEST_F(AnAdapter, HasWholeOnlyWhatTheModelHasAndOfItsShape) {
  write_config(R"({"r": 1, "lora_alpha": 2})");
  model_.add("lm_head.weight", {2, 2}, {1, 2, 3, 4});
  model_.write();
  view_ = {model_.catalog(), {}};
  add_pair();
  add("base_model.model.lm_head.weight", {3, 2}, counted(6));
  EXPECT_THAT(error(), HasSubstr("embedding and head of the model are tied")) << "as config.json says";
  names_.model.config.reset();
  EXPECT_THAT(error(), AllOf(HasSubstr("[3, 2] would replace"), HasSubstr("[2, 2]"), HasSubstr("was resized")));
  EXPECT_EQ(error(AdapterUse::kWritten), "") << "it is not held against the model";
}

TEST_F(AnAdapter, LosesWhatIsExcluded) {
  write_config(R"({"r": 1, "lora_alpha": 2})");
  add_pair();
  add("base_model.model.lm_head.weight", {3, 2}, counted(6));
  add("base_model.model." + kModule + ".lora_embedding_A", {1, 2}, {1, 10});
  selection_.exclude = {"*lora_embedding*", "*lm_head*"};
  EXPECT_THAT(must(read(AdapterUse::kMerged))->operands(), testing::ElementsAre(0, 1));
  selection_.exclude = {"*"};
  EXPECT_THAT(error(), HasSubstr("no adapter found"));
}

// PiSSA and similar methods: the given weights are no longer those from which the matrices were initialised.
TEST_F(AnAdapter, MadeOfTheWeightsBelongsToThoseItWasTrainedWith) {
  add_pair();
  for (const char* how : {"true", R"("gaussian")", R"("eva")"}) {
    const std::string config = std::string(R"({"r": 1, "lora_alpha": 2, "init_lora_weights": )") + how + "}";
    write_config(config);
    EXPECT_EQ(must(read(AdapterUse::kWritten))->config, config);
    EXPECT_EQ(error(), "");
  }
  for (const char* how : {"pissa_niter_4", "olora", "loftq"}) {
    write_config(std::string(R"({"r": 1, "lora_alpha": 2, "init_lora_weights": ")") + how + R"("})");
    EXPECT_THAT(error(), HasSubstr("init_lora_weights: the adapter was initialised from the weights"));
    const Json written = must(parse_json(must(read(AdapterUse::kWritten))->config, "written"));
    EXPECT_TRUE(must(written.find("init_lora_weights")->as_bool())) << "its weights are beside it";
  }
}

TEST_F(AnAdapter, OfAHeadThatIsTheEmbeddingIsRefused) {
  write_config(R"({"r": 1, "lora_alpha": 2})");
  model_.add("lm_head.weight", {3, 2}, counted(6));
  model_.write();
  view_ = {model_.catalog(), {}};
  add("base_model.model.lm_head.lora_A.weight", {1, 2}, {1, 10});
  add("base_model.model.lm_head.lora_B.weight", {3, 1}, {1, 2, 3});
  EXPECT_THAT(error(), HasSubstr("embedding and head of the model are tied, but the adapter changes only one of them"));
  add("base_model.model.model.embed_tokens.weight", {3, 2}, counted(6));
  EXPECT_THAT(error(), HasSubstr("tied, but the adapter changes each of them by itself"));
  selection_.exclude = {"*embed_tokens*"};
  names_.model.config.reset();
  EXPECT_EQ(error(), "");
}

// PEFT saves both if it saves embeddings: one weight under two names.
TEST_F(AnAdapter, OfBothTiedWeightsIsMergedIfItChangesThemAlike) {
  write_config(R"({"r": 1, "lora_alpha": 2})");
  const std::string embedding = "model.embed_tokens.weight", head = "lm_head.weight";
  for (const bool has_head : {false, true}) {
    model_.add(has_head ? head : embedding, {3, 2}, counted(6));
    model_.write();
    view_ = {model_.catalog(), {}};
    if (!has_head) {
      add_pair();
      add("base_model.model.lm_head.weight", {3, 2}, {5, 6, 7, 8, 9, 10});
      EXPECT_THAT(error(), HasSubstr("the adapter changes only one of them"));
      add("base_model.model.model.embed_tokens.weight", {3, 2}, {5, 6, 7, 8, 9, 10});
    }
    const Adapter adapter = must(read(AdapterUse::kMerged)).value();
    EXPECT_EQ(adapter.replaced.size(), has_head ? 2U : 1U);
    EXPECT_THAT(adapter.operands(), testing::ElementsAre(0, 1, 2, 3));
    FileSource stored(view_.catalog, model_.files()), operands(adapter_.catalog(), adapter_.files());
    ComputedSource merged(view_.catalog, stored);
    merge_adapter(adapter, stored, operands, merged);
    for (const std::string& name : has_head ? std::vector{embedding, head} : std::vector{embedding})
      EXPECT_EQ(floats_of(merged, name), (std::vector<float>{5, 6, 7, 8, 9, 10}));
  }
}

TEST_F(AnAdapter, OfAnotherKindIsRefused) {
  write_config(R"({"r": 1, "lora_alpha": 2})");
  add_pair();
  add("base_model.model.model.embed_tokens.trainable_tokens_delta", {1, 2}, {1, 2});
  EXPECT_THAT(error(), HasSubstr("the model has no weight 'model.embed_tokens.trainable_tokens_delta'"));
}

// lora_embedding_A [r, rows], lora_embedding_B [width, r].
TEST_F(AnAdapter, OfAnEmbeddingIsAddedTransposed) {
  write_config(R"({"r": 2, "lora_alpha": 4})");
  add("base_model.model." + kModule + ".lora_embedding_A", {2, 3}, {1, 2, 3, 10, 20, 30});
  add("base_model.model." + kModule + ".lora_embedding_B", {2, 2}, {1, 0, 0, 100});
  const Adapter adapter = must(read(AdapterUse::kMerged)).value();
  FileSource stored(view_.catalog, model_.files()), operands(adapter_.catalog(), adapter_.files());
  ComputedSource merged(view_.catalog, stored);
  merge_adapter(adapter, stored, operands, merged);
  EXPECT_EQ(floats_of(merged, kWeight), (std::vector<float>{3, 2002, 7, 4004, 11, 6006}));
}

TEST_F(AnAdapter, HasTheAlphaOfItsModule) {
  const std::string begin = R"({"r": 1, "lora_alpha": 2, "alpha_pattern": )";
  add_pair();
  const auto scaling = [&](const std::string& patterns) {
    write_config(begin + patterns + "}");
    return must(read(AdapterUse::kMerged))->added[0].scaling;
  };
  EXPECT_EQ(scaling("{}"), 2);
  EXPECT_EQ(scaling(R"({"k_proj": 3})"), 2);
  EXPECT_EQ(scaling(R"({"q_proj": 3})"), 3);
  EXPECT_EQ(scaling(R"({"self_attn.q_proj": 5, "q_proj": 3})"), 5) << "the first";
  EXPECT_EQ(scaling(R"({"^model.layers.0.self_attn.q_proj": 0.5})"), 0.5);
  write_config(begin + R"({"(q|k)_proj": 3}})");
  EXPECT_THAT(error(), HasSubstr("alpha_pattern: '(q|k)_proj': unsupported regular expression"));
  EXPECT_EQ(error(AdapterUse::kWritten), "");
  write_config(begin + R"({"q_proj": NaN}})");
  EXPECT_THAT(error(), HasSubstr("alpha_pattern: q_proj: expected a finite number"));
}

// Covers trainable_token_indices.
TEST_F(AnAdapter, HasRowsThatAreInsteadOfThoseOfAWeight) {
  const std::string begin = R"({"r": 1, "lora_alpha": 2, "trainable_token_indices": )";
  add("base_model.model." + kModule + ".token_adapter.trainable_tokens_delta", {2, 2}, {7, 8, 9, 10});
  for (const char* which : {"[2, 0]", R"({"other": [1], "q_proj": [2, 0]})"}) {
    write_config(begin + which + "}");
    const Adapter adapter = must(read(AdapterUse::kMerged)).value();
    EXPECT_TRUE(adapter.is_merged());
    EXPECT_THAT(adapter.operands(), testing::ElementsAre(0));
    FileSource stored(view_.catalog, model_.files()), operands(adapter_.catalog(), adapter_.files());
    ComputedSource merged(view_.catalog, stored);
    merge_adapter(adapter, stored, operands, merged);
    EXPECT_EQ(floats_of(merged, kWeight), (std::vector<float>{9, 10, 3, 4, 7, 8}));
    std::vector<float> part(2);  // of a slab
    std::vector<std::byte> scratch(1 << 20);
    must(merged.read(0, {{1, 1}, {2, 1}}, std::as_writable_bytes(std::span(part)), scratch));
    EXPECT_EQ(part, (std::vector<float>{4, 8}));
  }
  write_config(begin + "[0, 3]}");
  EXPECT_THAT(error(), HasSubstr("trainable_token_indices: expected distinct rows below 3, got 3"));
  write_config(begin + "[1, 1]}");
  EXPECT_THAT(error(), HasSubstr("expected distinct rows below 3, got 1"));
  write_config(begin + "[1]}");
  EXPECT_THAT(error(), HasSubstr("[2, 2] would replace 1 row of"));
  write_config(begin + R"({"other": [1, 2]}})");
  EXPECT_THAT(error(), HasSubstr("expected an entry for '" + kModule + "', got none"));
}

TEST_F(AnAdapter, IsScaledByTheRootOfItsRankWhereItsConfigSaysSo) {
  write_config(R"({"r": 4, "lora_alpha": 8, "use_rslora": true})");
  add(kA, {4, 2}, counted(8));
  add(kB, {3, 4}, counted(12));
  EXPECT_EQ(must(read(AdapterUse::kMerged))->added[0].scaling, 4);
}

TEST_F(AnAdapter, IsWrittenWithItsConfig) {
  const std::string config = R"({"r": 1, "lora_alpha": 2, "use_dora": true})";
  write_config(config);
  add_pair();
  const Adapter adapter = must(read(AdapterUse::kWritten)).value();
  EXPECT_EQ(adapter.config, config);
  EXPECT_FALSE(adapter.is_merged());
  EXPECT_THAT(error(AdapterUse::kMerged), HasSubstr("use_dora: merging adapters of this kind is not supported"));
}

TEST_F(AnAdapter, WithoutAConfigGetsOneOfTheAlphaThatIsGiven) {
  add_pair();
  EXPECT_THAT(error(AdapterUse::kWritten), AllOf(HasSubstr("has rank 1"), HasSubstr("add --lora-alpha")));
  const Json config = must(parse_json(must(read(AdapterUse::kWritten, 16.0))->config, "made"));
  EXPECT_EQ(must(config.get_index("r")), 1);
  EXPECT_EQ(must(config.find("lora_alpha")->as_double()), 16);
  EXPECT_EQ(to_text(*config.find("target_modules"), 0), R"(["q_proj"])");
}

// With "bias": "all", the biases that were trained with the adapter are stored in the weights next to it.
TEST_F(AnAdapter, WhoseBiasesAreInOtherWeightsIsRefused) {
  write_config(R"({"r": 1, "lora_alpha": 2, "bias": "all"})");
  add_pair();
  EXPECT_THAT(error(), HasSubstr("bias: it was trained with the adapter and is stored in the weights next to it"));
  EXPECT_EQ(error(AdapterUse::kWritten), "");
  write_config(R"({"r": 1, "lora_alpha": 2, "bias": "none"})");
  EXPECT_EQ(error(), "");
}

TEST_F(AnAdapter, IsNothingWhereNoneIsThereOrWanted) {
  EXPECT_EQ(must(read(AdapterUse::kWritten)), std::nullopt);
  EXPECT_THAT(error(AdapterUse::kMerged), HasSubstr("--merge-adapter: no adapter found"));
  add(kA, {1, 2}, {1, 10});
  EXPECT_FALSE(must(read(AdapterUse::kNone)).has_value()) << "nor is it looked at";
}

TEST_F(AnAdapter, OfAnotherMethodIsNamed) {
  add("base_model.model." + kModule + ".ia3_l", {3, 1}, {1, 2, 3});
  write_config(R"({"peft_type": "IA3"})");
  EXPECT_THAT(error(),
              HasSubstr("peft_type IA3: merging adapters of this kind is not supported; merge it with PEFT's"));
}

TEST_F(AnAdapter, HasBothMatricesOfAPair) {
  add(kA, {1, 2}, {1, 10});
  EXPECT_THAT(error(), HasSubstr("'" + kA + "': its lora_B is missing"));
  add(kB, {3, 2}, counted(6));
  EXPECT_THAT(error(), HasSubstr("expected as many rows of A as columns of B"));
}

TEST_F(AnAdapter, IsOfLinearLayersAndEmbeddings) {
  add("base_model.model." + kModule + ".lora_magnitude_vector", {3}, {1, 10, 100});
  EXPECT_THAT(error(), HasSubstr("expected lora_A or lora_B of a linear layer or embedding"));
  write_config(R"({"r": 1, "lora_alpha": 2, "use_dora": true})");
  EXPECT_THAT(error(AdapterUse::kMerged), HasSubstr("use_dora: merging adapters of this kind is not supported"));
}

TEST_F(AnAdapter, ToWeightsUnderOtherNamesIsToldOfThoseItKnows) {
  write_config(R"({"r": 1, "lora_alpha": 2})");
  add_pair();
  view_.catalog.tensor(0).name = "app." + kWeight;
  names_.to.reset();
  Catalog renamed;
  for (Tensor t : view_.catalog.tensors()) must(renamed.add(t));
  view_.catalog = renamed;
  EXPECT_THAT(error(), HasSubstr("add --names hf for the names that adapters use"));
}

TEST_F(AnAdapter, IsTheOnlyOneOfItsLayer) {
  add_pair();
  add("base_model.model." + kModule + ".lora_A.other.weight", {1, 2}, {1, 10});
  EXPECT_THAT(error(), HasSubstr("several adapters of one layer"));
}

TEST_F(AnAdapter, HasTheRankAndTheAlphaOfItsConfig) {
  add_pair();
  write_config(R"({"r": 2, "lora_alpha": 2})");
  EXPECT_THAT(error(), HasSubstr("r 2: the matrices of '" + kModule + "' have rank 1"));
  write_config(R"({"r": 1})");
  EXPECT_THAT(error(), HasSubstr("lora_alpha: expected a number"));
  write_config(R"({"r": 1, "lora_alpha": Infinity})");
  EXPECT_THAT(error(), HasSubstr("lora_alpha: expected a finite number"));
  write_config(R"({"r": 1, "lora_alpha": 2})");
  EXPECT_THAT(error(AdapterUse::kMerged, 4.0), HasSubstr("lora_alpha differs from --lora-alpha"));
  EXPECT_EQ(error(AdapterUse::kMerged, 2.0), "");
}

TEST_F(AnAdapter, ChangesAWeightOfTheModel) {
  write_config(R"({"r": 1, "lora_alpha": 2})");
  add("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", {1, 2}, {1, 10});
  add("base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight", {3, 1}, {1, 2, 3});
  EXPECT_THAT(error(), AllOf(HasSubstr("an adapter of another model"), HasSubstr("which is missing")));
  EXPECT_EQ(error(AdapterUse::kWritten), "") << "it is not looked for";
}

TEST_F(AnAdapter, ChangesAWeightOfItsShape) {
  write_config(R"({"r": 1, "lora_alpha": 2})");
  add(kA, {1, 3}, {1, 10, 100});
  add(kB, {3, 1}, {1, 2, 3});
  EXPECT_THAT(error(), AllOf(HasSubstr("an adapter of another model"), HasSubstr("[3, 1] x"), HasSubstr("[3, 2]")));
}

}  // namespace
}  // namespace reshard::adapter_test
