// Tests recognising the source's model, its naming convention, and that of the output.
#include "lib/convert/view/translation.h"

#include <gmock/gmock.h>

#include <filesystem>

#include "tests/support/conversion_steps.h"
#include "tests/support/made_checkpoint.h"
#include "tests/support/temp_dir.h"

namespace reshard::translation_test {
namespace {

namespace fs = std::filesystem;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class ConfigOfAConversion : public testing::Test {
 protected:
  ConfigOfAConversion() { fs::create_directory(dir_ / "ckpt"); }
  Result<ConfigFile> read(const std::string& given = "") {
    MadeCheckpoint source(dir_ / "ckpt", "data");
    Request wanted;
    wanted.config_path = given;
    notes_ = {};
    return read_config_file(source, wanted, notes_);
  }
  TempDir dir_;
  ConversionNotes notes_;
};

TEST_F(ConfigOfAConversion, IsTheFileThatWasNamedOrFound) {
  EXPECT_FALSE(must(read()).is_there());
  const std::string named = dir_.write("elsewhere/llama.json", kTinyLlama);
  EXPECT_EQ(must(read(named)).path, named);
  EXPECT_THAT(error_of(read(dir_ / "none.json")), HasSubstr("none.json"));
  for (const char* found : {"config.json", "ckpt/config.json"}) {  // the nearer file takes precedence
    const std::string path = dir_.write(found, kTinyLlama);
    const ConfigFile file = must(read());
    EXPECT_EQ(file.path, path);
    EXPECT_EQ(file.text, kTinyLlama);
    EXPECT_TRUE(file.is_copied);
    EXPECT_EQ(must(file.model()).vocab_size(), 10);
    EXPECT_THAT(notes_.warnings, IsEmpty());
  }
  EXPECT_EQ(must(read(named)).path, named);
}

TEST_F(ConfigOfAConversion, IsElseWhatTheFormatMakes) {
  class Maker : public MadeCheckpoint {
   public:
    using MadeCheckpoint::MadeCheckpoint;
    Result<std::optional<Json>> made_config() override { return std::optional(parse_json(kTinyLlama, "made").value()); }
  };
  Maker source(dir_ / "ckpt", "data");
  const ConfigFile file = must(read_config_file(source, {}, notes_));
  EXPECT_EQ(file.path, dir_ / "ckpt/config.json");
  EXPECT_EQ(must(file.model()).vocab_size(), 10);
  EXPECT_TRUE(file.is_copied);
}

TEST_F(ConfigOfAConversion, OfNoModelIsNoneUnlessItWasNamed) {
  const std::string path = dir_.write("config.json", R"({"learning_rate": 1})");
  EXPECT_FALSE(must(read()).is_there());
  EXPECT_THAT(notes_.warnings,
              ElementsAre(path + " has no model_type, so it does not describe a model and is ignored"));
  EXPECT_EQ(must(read(path)).text, R"({"learning_rate": 1})");
  EXPECT_THAT(notes_.warnings, IsEmpty());
  dir_.write("config.json", "{");
  EXPECT_THAT(error_of(read()), HasSubstr(path));
}

TEST_F(ConfigOfAConversion, BehindALinkIsUsedAndNotCopied) {
  const std::string real = dir_.write("elsewhere/secret.json", kTinyLlama);
  const std::string path = dir_ / "ckpt/config.json";
  fs::create_symlink(real, path);
  const ConfigFile found = must(read());
  EXPECT_EQ(found.text, kTinyLlama);
  EXPECT_FALSE(found.is_copied);
  EXPECT_THAT(notes_.warnings, ElementsAre(HasSubstr("is a link out of the checkpoint, to " + real)));
  EXPECT_TRUE(must(read(path)).is_copied);
}

// ---- Whether loaders recognise the output as a model

// Returns a model with two layers, a vocabulary of 20 tokens with width 4, and two modules at the top, named like
// transformers' models.
Catalog unknown_model() {
  TempDir dir;
  MadeCheckpoint made(dir.path(), "data");
  made.add("body.words.weight", {20, 4}, counted(80));
  for (const char* layer : {"0", "1"})
    made.add("body.blocks." + std::string(layer) + ".mix.weight", {4, 4}, counted(16));
  made.add("tail.weight", {4}, counted(4));
  return made.catalog();
}

constexpr const char* kUnknown = R"({"model_type": "newer", "vocab_size": 20, "n_layer": 2, "hidden_size": 4})";

struct Checked {
  std::string error;
  ConversionNotes notes;
  ConfigFile file;
};
Checked check(const Catalog& source, const Request& wanted, const Format& format, const std::string& config = "",
              bool is_given = false) {
  Checked out;
  out.file = {"c.json", config, {}, is_given};
  const Translation names = must(translate(source, wanted.model, out.file, wanted.naming, format));
  out.error = error_of(check_names(source, names, wanted, format, out.file, out.notes));
  return out;
}

TEST(NamesOfAnOutput, AreRefusedWhereNoFamilyKnowsThem) {
  const Catalog source = unknown_model();
  const std::string why = "no known model family has these tensor names ('body.words.weight'";
  EXPECT_THAT(check(source, {}, kModels).error, AllOf(HasSubstr(why), HasSubstr("Add --family none to write it")));
  EXPECT_EQ(check(source, {}, kAll).error, "") << "which claims nothing";
  Request wanted;
  wanted.naming.convention = Convention::kHf;
  EXPECT_THAT(check(source, wanted, kAll).error, HasSubstr(why));
  wanted = {};
  wanted.naming.keep_names = true;
  EXPECT_EQ(check(source, wanted, kModels).error, "");
  EXPECT_THAT(check(source, {}, kModels, kTinyLlama).error,
              HasSubstr("c.json is of family llama, and no tensor name matches it ('body.words.weight'"));
}

// BERT's parameters in a dictionary. Without a head a prefix may or may not be a wrapper, and the error names the
// option that decides.
TEST(NamesOfAnOutput, ThatAllBeginAlikeAreRefusedWithTheOptionThatTakesItOff) {
  TempDir dir;
  MadeCheckpoint made(dir.path(), "data");
  made.add("model.bert.words.weight", {20, 4}, counted(80));
  made.add("model.cls.dense.weight", {4, 4}, counted(16));
  EXPECT_THAT(check(made.catalog(), {}, kModels).error,
              HasSubstr("every name begins with 'model.': if that is a wrapper around the model, remove it with "
                        "--strip-prefix model."));
  EXPECT_THAT(check(unknown_model(), {}, kModels).error, Not(HasSubstr("every name begins")));
}

TEST(NamesOfAnOutput, AreTheSourcesOwnWhereTheUserSaysSo) {
  Request wanted;
  wanted.model = {false, nullptr};
  Checked checked = check(unknown_model(), wanted, kModels, kTinyLlama);
  EXPECT_EQ(checked.error, "");
  EXPECT_THAT(checked.notes.warnings, ElementsAre("names, shapes and rows are the source's own: nothing was compared "
                                                  "with a model's config",
                                                  "c.json is not copied"));
  EXPECT_FALSE(checked.file.is_copied) << "it is of another model";
  checked = check(unknown_model(), wanted, kModels, kTinyLlama, true);
  EXPECT_EQ(checked.notes.warnings.size(), 1U);
  EXPECT_TRUE(checked.file.is_copied);
}

TEST(NamesOfAnOutput, AreTheSourcesOwnWhereItsConfigConfirmsThem) {
  Catalog source = unknown_model();
  const Checked confirmed = check(source, {}, kModels, kUnknown);
  EXPECT_EQ(confirmed.error, "");
  EXPECT_THAT(confirmed.notes.warnings, ElementsAre(AllOf(HasSubstr("c.json: checked n_layer"),
                                                          HasSubstr("no family describes model_type 'newer'"))));
  EXPECT_TRUE(confirmed.file.is_copied);
  const std::string three_layers = R"({"model_type": "newer", "vocab_size": 20, "n_layer": 3, "hidden_size": 4})";
  EXPECT_NE(check(source, {}, kModels, three_layers).error, "");
  source.has_model_names = true;
  EXPECT_EQ(check(source, {}, kModels, three_layers).error, "") << "the source's format is one of models";
}

TEST(NamesOfAnOutput, OfAModelWithoutWordsAreConfirmedByWhatItSees) {
  TempDir dir;
  MadeCheckpoint made(dir.path(), "data");
  made.add("vit.embeddings.patch.weight", {4, 3, 2, 2}, counted(48));
  for (const char* layer : {"0", "1"})
    made.add("vit.layers." + std::string(layer) + ".mix.weight", {4, 4}, counted(16));
  made.add("classifier.weight", {5, 4}, counted(20));
  const std::string config = R"({"model_type": "vit", "num_hidden_layers": 2, "hidden_size": 4, "num_channels": 3)";
  const Checked confirmed = check(made.catalog(), {}, kModels, config + R"(, "patch_size": 2})");
  EXPECT_EQ(confirmed.error, "");
  EXPECT_THAT(confirmed.notes.warnings, ElementsAre(AllOf(HasSubstr("c.json: checked num_hidden_layers"),
                                                          HasSubstr("no tensor has a name of ViTModel"))));
  EXPECT_NE(check(made.catalog(), {}, kModels, config + R"(, "patch_size": 4})").error, "");
  EXPECT_NE(check(made.catalog(), {}, kModels, config + "}").error, "");
}

TEST(NamesOfAnOutput, BeginWithLayersInAClassWithoutAHead) {
  TempDir dir;
  MadeCheckpoint made(dir.path(), "data");
  made.add("words.weight", {20, 4}, counted(80));
  for (const char* layer : {"0", "1"}) made.add("blocks." + std::string(layer) + ".mix.weight", {4, 4}, counted(16));
  const auto of_class = [](const std::string& name) {
    return R"({"model_type": "newer", "vocab_size": 20, "n_layer": 2, "hidden_size": 4, "architectures": [")" + name +
           R"("]})";
  };
  EXPECT_EQ(check(made.catalog(), {}, kModels, of_class("NewerModel")).error, "");
  EXPECT_NE(check(made.catalog(), {}, kModels, of_class("NewerForCausalLM")).error, "");
}

TEST(NamesOfAnOutput, AreNoModelsWithAdaptersBesideTheWeights) {
  Catalog source = unknown_model();
  Tensor adapter = source.tensors()[1];
  adapter.name = "base_model.model.body.blocks.0.mix.lora_A.weight";
  adapter.plain_key = "peft_adapter." + adapter.name;
  ASSERT_TRUE(source.add(std::move(adapter)));
  EXPECT_THAT(
      check(source, {}, kModels, kUnknown).error,
      HasSubstr("it contains adapters next to the weights they change ('base_model.model.body.blocks.0.mix.lora_A"));
}

TEST(NamesOfAnOutput, LeaveNothingOutOfAModelsFiles) {
  Catalog source = unknown_model();
  source.parts = {{StateKind::kModel, "body.", "model", "the names under it are those of family llama"}};
  Tensor beside = source.tensors()[0];
  beside.name = "projection.weight";
  beside.plain_key = "extra_state.projection.weight";
  ASSERT_TRUE(source.add(std::move(beside)));
  Request wanted;
  source.has_model_names = true;
  EXPECT_THAT(
      check(source, wanted, kModels, kUnknown).error,
      AllOf(HasSubstr("the names under 'body.' were taken for the model (the names under it are those of family "
                      "llama), and next to it is 'projection.weight', which the output would leave out"),
            HasSubstr("--exclude")));
  wanted.selection.exclude = {"projection.*"};
  EXPECT_EQ(check(source, wanted, kModels, kUnknown).error, "");
  source.has_model_names = false;
  const Checked state = check(source, {}, kModels, kUnknown);
  EXPECT_EQ(state.error, "") << "a training state has more than the model";
  EXPECT_THAT(state.notes.warnings, Contains(HasSubstr("'projection.weight' is left out: the names under 'body.'")));
}

TEST(NamesOfAnOutput, OfAKnownFamilyAreChecked) {
  TempDir dir;
  MadeCheckpoint made(dir.path(), "data");
  made.add("model.embed_tokens.weight", {10, 4}, counted(40));
  const Checked checked = check(made.catalog(), {}, kModels, kTinyLlama);
  EXPECT_EQ(checked.error, "");
  EXPECT_THAT(checked.notes.warnings, IsEmpty());
}

}  // namespace
}  // namespace reshard::translation_test
