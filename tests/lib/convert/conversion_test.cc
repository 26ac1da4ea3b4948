// Tests each step of steps.h alone, on catalogs built here.
#include <gmock/gmock.h>

#include <filesystem>

#include "lib/convert/steps.h"
#include "tests/support/conversion_steps.h"
#include "tests/support/made_checkpoint.h"
#include "tests/support/temp_dir.h"

namespace reshard::conversion_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Values = std::vector<float>;

// Adds a tensor that is stored in one piece, the n-th of a file.
void add(Catalog& catalog, const std::string& name, const Dims& shape, DType dtype = DType::kFloat32) {
  if (catalog.files.empty()) catalog.files.push_back({"data", 0});
  Tensor t;
  t.name = name;
  t.dtype = dtype;
  t.shape = shape;
  t.fragments = FragmentList(shape.rank());
  t.fragments.add(whole(shape), {0, catalog.files[0].size, t.bytes()});
  catalog.files[0].size += t.bytes();
  ASSERT_TRUE(catalog.add(std::move(t)));
}

Catalog torchtitan() {
  Catalog catalog;
  catalog.root = "ckpt";
  add(catalog, "tok_embeddings.weight", {10, 4});
  add(catalog, "layers.0.attention.wq.weight", {4, 4});
  add(catalog, "layers.0.attention.wk.weight", {4, 4});
  add(catalog, "output.weight", {10, 4});
  add(catalog, "optimizer.state.output.weight.exp_avg", {10, 4});
  catalog.blobs.push_back({"train_state", {0, 0, 7}, {}});
  return catalog;
}

TEST(ConversionSteps, TheOutputsWordsAreTheFormatsUnlessSaid) {
  const Catalog catalog = torchtitan();
  EXPECT_EQ(translated(catalog, kModels).to, Convention::kHf);
  EXPECT_TRUE(translated(catalog, kModels).hf_rows);
  EXPECT_FALSE(translated(catalog, kAll).renames());
  EXPECT_FALSE(translated(catalog, kModels, {.convention = {}, .keep_names = true}).renames());
  const auto same = translated(catalog, kModels, {.convention = Convention::kTorchtitan2026, .keep_names = false});
  EXPECT_FALSE(same.hf_rows) << "both have rotary pairs";
  EXPECT_EQ(must(translate(catalog, {false, nullptr}, {"c.json", "not JSON", {}}, {}, kModels)).model.family, nullptr);
}

TEST(ConversionSteps, WhatTakesNoPartIsCounted) {
  const Catalog catalog = torchtitan();
  ConversionNotes notes;
  const Selected model =
      must(select(catalog, {.include = {}, .exclude = {"output*"}, .part = {}}, kModels, false, true, notes));
  EXPECT_THAT(model.tensors, ElementsAre(0, 1, 2));
  EXPECT_TRUE(model.blobs.empty());
  EXPECT_FALSE(model.complete);
  ASSERT_EQ(notes.left_out.size(), 3U);
  EXPECT_EQ(notes.left_out[0].what, "optimizer");
  EXPECT_EQ(notes.left_out[1].bytes, 7);
  EXPECT_EQ(notes.left_out[2].what, "excluded");
  ConversionNotes none;
  EXPECT_TRUE(must(select(catalog, {}, kAll, false, true, none)).complete);
  EXPECT_TRUE(none.left_out.empty());
  EXPECT_FALSE(select(catalog, {.include = {"nothing"}, .exclude = {}, .part = {}}, kAll, false, true, none));
}

TEST(ConversionSteps, FaultyTensorsAreLeftOutWhenAllowed) {
  Catalog catalog = torchtitan();
  catalog.tensor(1).fragments = FragmentList(2);
  ConversionNotes notes;
  const Selected selected = must(select(catalog, {}, kAll, true, false, notes));
  EXPECT_THAT(selected.tensors, ElementsAre(0, 2, 3, 4));
  EXPECT_THAT(notes.left_out[0].names, ElementsAre("layers.0.attention.wq.weight"));
}

TEST(ConversionSteps, TheViewIsUnderCanonicalNames) {
  const Catalog catalog = torchtitan();
  const SourceView view = viewed(catalog, kModels, translated(catalog, kModels));
  EXPECT_THAT(names_of(view.catalog), testing::UnorderedElementsAre("lm_head.weight", "model.embed_tokens.weight",
                                                                    "model.layers.0.self_attn.k_proj.weight",
                                                                    "model.layers.0.self_attn.q_proj.weight"));
  EXPECT_EQ(view.native("lm_head.weight"), "output.weight");
  EXPECT_TRUE(view.is_stored("lm_head.weight"));
  EXPECT_EQ(names_of(viewed(catalog, kAll, translated(catalog, kAll)).catalog), names_of(catalog));
}

TEST(ConversionSteps, ATiedHeadIsLeftOutAndHasToBeEqual) {
  const Catalog catalog = torchtitan();
  const Translation names = translated(catalog, kModels);
  const SourceView view = viewed(catalog, kModels, names);
  ConversionNotes notes;
  const OutputTensors out = must(name_tensors(view, names, {.dtype = DType::kBFloat16, .keep_dtype = {"*wq*"}}, notes));
  ASSERT_EQ(out.equal.size(), 1U);
  EXPECT_EQ(view.catalog.tensors()[out.equal[0].kept].name, "model.embed_tokens.weight");
  EXPECT_EQ(view.catalog.tensors()[out.equal[0].left_out].name, "lm_head.weight");
  EXPECT_EQ(out.tensors.size(), 3U);
  EXPECT_EQ(out.converted, 2);
  for (const TargetTensor& t : out.tensors)
    EXPECT_EQ(t.dtype, t.name.ends_with("q_proj.weight") ? DType::kFloat32 : DType::kBFloat16) << t.name;
}

TEST(ConversionSteps, RowsOfAVocabularyArePaddedOnlyWithAWord) {
  const Catalog catalog = torchtitan();
  const Translation names = translated(catalog, kAll);
  FilePool files;
  ConversionNotes notes;
  const auto padded = [&](const VocabularyRows& rows) -> Result<SourceView> {
    SourceView view = viewed(catalog, kAll, names);
    TRY(pad_vocabulary(view, files, names, rows, {}, kAll, {}, notes));
    return view;
  };
  EXPECT_THAT(padded({{}, 4}).error().message(), HasSubstr("the target's vocabulary 12; choose the content"));
  EXPECT_THAT(padded({PaddingFill::kZero, 0}).error().message(), HasSubstr("needs the number of rows to add"));
  const SourceView view = must(padded({PaddingFill::kRepeatLast, 4}));
  EXPECT_EQ(view.catalog.tensors()[*view.catalog.find("output.weight")].shape, (Dims{12, 4}));
  EXPECT_THAT(notes.warnings, ElementsAre(HasSubstr("2 rows (repeat-last) are added to the vocabulary")));
  EXPECT_EQ(notes.repairs.size(), 1U);
}

TEST(ConversionSteps, TensorsArePlacedByTheFamilysRules) {
  const Catalog catalog = torchtitan();
  const Translation names = translated(catalog, kModels);
  const SourceView view = viewed(catalog, kModels, names);
  ConversionNotes notes;
  OutputTensors out = must(name_tensors(view, names, {}, notes));
  const RankPlacement on{must(Mesh::parse("tp=2")), {}};
  ASSERT_TRUE(place(out, view, names.model, on, kModels, notes));
  for (const TargetTensor& t : out.tensors) {
    Index elements = 0;
    for (const LocalBox& b : owned_boxes(on.mesh, t.placement, t.shape, 1)) elements += volume(b.box);
    EXPECT_EQ(2 * elements, volume(t.shape)) << t.name;
  }
}

// ---- rows

const std::string kQ = "model.layers.0.self_attn.q_proj.weight", kK = "model.layers.0.self_attn.k_proj.weight",
                  kV = "model.layers.0.self_attn.v_proj.weight";

// Adds all parameters of kTinyLlama under Hugging Face names.
void add_model(MadeCheckpoint& to, Index rows = 10) {
  to.add("model.embed_tokens.weight", {rows, 4}, counted(rows * 4));
  for (const std::string& name : {kQ, kK, kV}) to.add(name, {4, 4}, counted(16));
  to.add("model.layers.0.self_attn.o_proj.weight", {4, 4}, counted(16));
  for (const char* name : {"gate", "up"})
    to.add("model.layers.0.mlp." + std::string(name) + "_proj.weight", {6, 4}, counted(24));
  to.add("model.layers.0.mlp.down_proj.weight", {4, 6}, counted(24));
  for (const char* name : {"layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"})
    to.add("model." + std::string(name) + ".weight", {4}, counted(4));
  to.write();
}

class RowsOfAView : public testing::Test {
 protected:
  void begin(const std::string& config = kTinyLlama) {
    names_ = config.empty() ? must(translate(source_.catalog(), {}, {}, {}, kAll))
                            : translated(source_.catalog(), kAll, {}, config);
    view_ = {source_.catalog(), {}};
  }
  Result<std::optional<Identity>> repair_it(bool complete = true, bool allow = false) {
    fit_.family = names_.model.family;
    fit_.config = names_.model.config_or_null();
    fit_.spool = dir_.path();
    fit_.run.memory = Index{1} << 30;
    notes_ = {};
    return repair(view_, source_.files(), fit_, complete, allow, notes_);
  }
  Values read(const std::string& tensor) { return floats_of(view_.catalog, source_.files(), tensor); }

  TempDir dir_;
  MadeCheckpoint source_{dir_.path(), "data"};
  Translation names_;
  SourceView view_;
  RepairOptions fit_;
  ConversionNotes notes_;
};

TEST_F(RowsOfAView, AreThoseOfTheConfig) {
  add_model(source_);
  begin();
  const Identity identity = must(repair_it()).value();
  EXPECT_EQ(identity.expected, 11);
  EXPECT_EQ(identity.present, 11);
  EXPECT_THAT(notes_.warnings, IsEmpty());
  EXPECT_EQ(notes_.repairs.size(), 0U);
}

TEST_F(RowsOfAView, BeyondTheVocabularyAreCutWhereAskedFor) {
  add_model(source_, 12);
  begin();
  EXPECT_THAT(error_of(repair_it()), HasSubstr("--repair vocab"));
  fit_.repairs.vocabulary = true;
  EXPECT_TRUE(must(repair_it()).has_value());
  EXPECT_EQ(read("model.embed_tokens.weight"), counted(40));
  EXPECT_THAT(notes_.warnings, ElementsAre(HasSubstr("beyond the vocabulary of 10")));
  EXPECT_EQ(notes_.repairs.size(), 1U);
}

TEST_F(RowsOfAView, ThatDoNotFitAreAsTheyAreWhereAllowed) {
  add_model(source_, 12);
  begin();
  EXPECT_EQ(must(repair_it(true, true)), std::nullopt) << "it is not the model";
  EXPECT_EQ(read("model.embed_tokens.weight"), counted(48));
  EXPECT_THAT(notes_.warnings, ElementsAre(HasSubstr("--repair vocab"), HasSubstr("model.embed_tokens.weight")));
}

TEST_F(RowsOfAView, OfAModelAreAllThereUnlessSomeWereLeftOut) {
  source_.add("model.embed_tokens.weight", {10, 4}, counted(40));
  source_.write();
  begin();
  EXPECT_THAT(error_of(repair_it()), HasSubstr("reshard verify explains it; add --allow config to write it anyway"));
  EXPECT_EQ(must(repair_it(false)).value().present, 1);
}

TEST_F(RowsOfAView, AreNotJudgedWithoutAConfig) {
  source_.add(kQ, {3, 3}, counted(9));
  source_.write();
  begin("");
  EXPECT_EQ(must(repair_it()), std::nullopt);
  EXPECT_THAT(notes_.warnings, ElementsAre(HasSubstr("no config.json: the names match family llama")));
  fit_.repairs.vocabulary = true;
  EXPECT_THAT(error_of(repair_it()), HasSubstr("--repair needs the model's config.json"));
}

// ---- heads

const Format kLocal = {.name = "local",
                       .title = "Local",
                       .recognises = nullptr,
                       .open = nullptr,
                       .lay_out = nullptr,
                       .sharding = Sharding::kLocal};

TEST_F(RowsOfAView, OfHeadsAreRepeatedForRanksThatShareThem) {
  add_model(source_);
  const Values head0 = counted(8), head1 = counted(8, 8);
  Values twice = head0;
  for (const Values& head : {head0, head1, head1}) twice.insert(twice.end(), head.begin(), head.end());
  const RankPlacement on{must(Mesh::parse("tp=4")), {}};
  begin();
  ASSERT_TRUE(repeat_heads(view_, names_, on, kAll, notes_));
  EXPECT_EQ(read(kK), counted(16)) << "a format of whole tensors";
  ASSERT_TRUE(repeat_heads(view_, names_, on, kLocal, notes_));
  EXPECT_EQ(read(kK), twice);
  EXPECT_EQ(read(kV), twice);
  EXPECT_EQ(read(kQ), counted(16));
  EXPECT_THAT(notes_.warnings, ElementsAre("Each key-value head is held by 2 ranks: 2 tensors become 2 times as "
                                           "long."));
}

TEST_F(RowsOfAView, OfHeadsAreRepeatedAsTheLayoutSays) {
  add_model(source_);
  begin();
  RankPlacement on{must(Mesh::parse("tp=2")), LayoutDescriptor()};
  on.layout->name = "l";
  ASSERT_TRUE(repeat_heads(view_, names_, on, kLocal, notes_));
  EXPECT_EQ(read(kK), counted(16)) << "it says nothing of heads";
  on.layout->kv_heads = KvHeads{{"*k_proj*"}, 3};
  ASSERT_TRUE(repeat_heads(view_, names_, on, kAll, notes_));
  EXPECT_EQ(view_.catalog.tensors()[*view_.catalog.find(kK)].shape, (Dims{12, 4}));
  EXPECT_EQ(read(kV), counted(16));
  on.layout->kv_heads = KvHeads{{"*q_proj*"}, 3};
  EXPECT_THAT(
      error_of(repeat_heads(view_, names_, on, kAll, notes_)),
      AllOf(HasSubstr(kQ), HasSubstr("the layout repeats key-value heads; expected rows that are a multiple of 2")));
  on.layout->kv_heads = KvHeads{{"*v_proj*"}, 3};
  view_.computed.insert(*view_.catalog.find(kV));
  EXPECT_THAT(error_of(repeat_heads(view_, names_, on, kAll, notes_)),
              HasSubstr("not supported for quantized matrices"));
  begin("");
  EXPECT_THAT(error_of(repeat_heads(view_, names_, on, kAll, notes_)),
              HasSubstr("layout 'l' repeats key-value heads, and no config.json gives their number"));
}

// ---- objects

class ObjectsOfAView : public testing::Test {
 protected:
  // Returns the output's names of the objects, and their values.
  Result<std::map<std::string, std::string>> names(const Format& format, const Naming& naming, bool with_bytes = true) {
    source_.write();
    const Translation names = translated(source_.catalog(), format, naming);
    std::map<std::string, std::string> out;
    const auto blobs = TRY(name_blobs(source_, viewed(source_.catalog(), format, names), names, with_bytes));
    for (const TargetBlob& b : blobs) {
      EXPECT_EQ(dotted_name(b.path), b.name);
      out[b.name] = b.bytes;
    }
    EXPECT_EQ(out.size(), blobs.size()) << "a name twice";
    return out;
  }
  void add_step(const std::string& parameter, const std::string& value) {
    source_.add_object("optimizer.state." + parameter + ".step", value);
  }
  static constexpr Naming kAsMegatron{.convention = Convention::kMegatron, .keep_names = false};

  TempDir dir_;
  MadeCheckpoint source_{dir_.path(), "data"};
};
using Objects = std::map<std::string, std::string>;

TEST_F(ObjectsOfAView, AreNamedAfterTheirParameters) {
  add_model(source_);
  add_step("lm_head.weight", "7");
  source_.add_object("train_state", "state");
  EXPECT_EQ(must(names(kAll, {})), (Objects{{"optimizer.state.lm_head.weight.step", "7"}, {"train_state", "state"}}));
  EXPECT_EQ(must(names(kAll, {.convention = Convention::kTorchtitan, .keep_names = false})),
            (Objects{{"optimizer.state.output.weight.step", "7"}, {"train_state", "state"}}));
}

TEST_F(ObjectsOfAView, OfParametersThatBecomeOneAreEqual) {
  add_model(source_);
  for (const std::string& parameter : {kQ, kK, kV}) add_step(parameter, "7");
  const std::string packed = "optimizer.state.decoder.layers.0.self_attention.linear_qkv.weight.step";
  EXPECT_EQ(must(names(kAll, kAsMegatron)), (Objects{{packed, "7"}}));
  source_.add_object("optimizer.state.model.layers.0.mlp.gate_proj.weight.step", "7");
  source_.add_object("optimizer.state.model.layers.0.mlp.up_proj.weight.step", "8");
  EXPECT_THAT(
      error_of(names(kAll, kAsMegatron)),
      AllOf(HasSubstr("up_proj.weight.step' differs from another object that also becomes"), HasSubstr("linear_fc1")));
  EXPECT_EQ(must(names(kAll, kAsMegatron, false)).size(), 2U) << "nobody looks at them";
}

TEST_F(ObjectsOfAView, OfAParameterThatIsSplitAreRepeated) {
  source_.add("decoder.layers.0.self_attention.linear_qkv.weight", {12, 4}, counted(48));
  add_step("decoder.layers.0.self_attention.linear_qkv.weight", "7");
  Objects expected;
  for (const std::string& parameter : {kQ, kK, kV}) expected["optimizer.state." + parameter + ".step"] = "7";
  EXPECT_EQ(must(names(kAll, {.convention = Convention::kHf, .keep_names = false})), expected);
}

TEST_F(ObjectsOfAView, ThatCannotBeReadAreAsLongForAPlan) {
  class Unreadable : public MadeCheckpoint {
   public:
    using MadeCheckpoint::MadeCheckpoint;
    Result<std::string> blob_bytes(const Blob&) override { return io_error("no such file"); }
  };
  Unreadable source(dir_.path(), "data");
  source.add("x", {1}, {1});
  source.add_object("train_state", "state");
  source.write();
  const SourceView view{source.catalog(), {}};
  EXPECT_EQ(error_of(name_blobs(source, view, {}, true)), "no such file");
  EXPECT_EQ(must(name_blobs(source, view, {}, false)).at(0).bytes, std::string(5, '\0'));
}

// ---- Files next to the output

TEST(SideFilesOfAnOutput, LieBesideTheConfigOrTheSource) {
  static constexpr std::string_view kWanted[] = {"a", "b", "c", "d", "e"};
  Format format = kModels;
  format.side_files = kWanted;
  const TempDir dir;
  Catalog source;
  source.root = dir / "ckpt";
  for (const char* file : {"config/a", "ckpt/a", "ckpt/b", "b", "c", "elsewhere/d"}) dir.write(file, "x");
  fs::create_symlink(dir / "elsewhere/d", dir / "ckpt/d");
  dir.write("d", "x");
  ConversionNotes notes;
  const auto found = [&](const std::string& config, const Format& target) {
    std::vector<std::string> paths;
    for (const SideFile& file : must(find_side_files(source, config, target, notes))) paths.push_back(file.path);
    return paths;
  };
  EXPECT_THAT(found(dir / "config/config.json", format), ElementsAre(dir / "config/a", dir / "ckpt/b", dir / "c"));
  EXPECT_THAT(notes.warnings, ElementsAre(dir / "ckpt/d is a link out of the checkpoint, to " +
                                          fs::canonical(dir / "elsewhere/d").string() + ": it is not copied"));
  EXPECT_THAT(found("", format), ElementsAre(dir / "ckpt/a", dir / "ckpt/b", dir / "c"));
  EXPECT_THAT(found("", kModels), IsEmpty()) << "which wants none";
}

// ---- Formats that refer to tensors in place

TEST(NamedViews, AreOfTheSameBytes) {
  const Catalog catalog = torchtitan();
  const Catalog as_stored =
      must(name_view(viewed(catalog, kAll, translated(catalog, kAll)), translated(catalog, kAll), {}));
  EXPECT_EQ(names_of(as_stored), names_of(catalog));
  const Translation names = translated(catalog, kModels);
  const Catalog view = must(name_view(viewed(catalog, kModels, names), names, {}));
  EXPECT_EQ(view.root, catalog.root);
  EXPECT_TRUE(view.blobs.empty());
  const Tensor& embedding = view.tensors()[*view.find("model.embed_tokens.weight")];
  EXPECT_TRUE(is_same_data(embedding, catalog.tensors()[0]));
  const Tensor& q = view.tensors()[*view.find(kQ)];
  EXPECT_EQ(q.fragments.get(0).strides, (Dims{8, 1})) << "every other row, in Hugging Face's order";
}

TEST(NamedViews, ShowWhatIsStoredAndNothingElse) {
  const Catalog catalog = torchtitan();
  const Translation stored = translated(catalog, kAll), hf = translated(catalog, kModels);
  EXPECT_THAT(error_of(name_view(viewed(catalog, kAll, stored), stored, {.dtype = DType::kBFloat16, .keep_dtype = {}})),
              HasSubstr("--dtype: a view shows the stored values"));
  TempDir dir;
  MadeCheckpoint model(dir.path(), "data");
  add_model(model);
  const Translation pairs =
      translated(model.catalog(), kAll, {.convention = Convention::kTorchtitan, .keep_names = false});
  EXPECT_THAT(error_of(name_view(viewed(model.catalog(), kAll, pairs), pairs, {})),
              HasSubstr("a view in the row order of torchtitan names"));
  const Translation packed =
      translated(model.catalog(), kAll, {.convention = Convention::kMegatron, .keep_names = false});
  EXPECT_THAT(error_of(name_view(viewed(model.catalog(), kAll, packed), packed, {})),
              AllOf(HasSubstr("linear_fc1"), HasSubstr("would combine several tensors")));
}

}  // namespace
}  // namespace reshard::conversion_test
