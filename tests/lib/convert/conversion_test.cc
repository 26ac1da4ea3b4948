// Every step of a conversion by itself, on catalogs made here.
#include <gmock/gmock.h>

#include "lib/convert/steps.h"

namespace reshard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr const char* kConfig = R"({"model_type": "llama", "vocab_size": 10, "hidden_size": 4, "intermediate_size": 6,
  "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": true})";

// A tensor in one piece, the n-th of a file.
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

template <class T>
T must(Result<T> r) {
  EXPECT_TRUE(r) << (r ? "" : r.error().message());
  return *std::move(r);
}

std::vector<std::string> names_of(const Catalog& catalog) {
  std::vector<std::string> out;
  for (const Tensor& t : catalog.tensors()) out.push_back(t.name);
  return out;
}

const Format kModels = {.name = "models",
                        .title = "Models",
                        .recognises = nullptr,
                        .open = nullptr,
                        .lay_out = nullptr,
                        .holds = Holds::kModel,
                        .hf_names = true};
const Format kAll = {.name = "all", .title = "All", .recognises = nullptr, .open = nullptr, .lay_out = nullptr};

Translation translated(const Catalog& catalog, const Format& format, const Naming& naming = {}) {
  return must(translate(catalog, {}, {"c.json", kConfig}, naming, format));
}

SourceView viewed(const Catalog& catalog, const Format& format, const Translation& names) {
  Notes notes;
  const Selected selected = must(select(catalog, {}, format, false, true, notes));
  return must(view_source(catalog, selected, names, false, true, notes));
}

TEST(ConversionSteps, TheOutputsWordsAreTheFormatsUnlessSaid) {
  const Catalog catalog = torchtitan();
  EXPECT_EQ(translated(catalog, kModels).to, Convention::kHf);
  EXPECT_TRUE(translated(catalog, kModels).hf_rows);
  EXPECT_FALSE(translated(catalog, kAll).renames());
  EXPECT_FALSE(translated(catalog, kModels, {.convention = {}, .keep_names = true}).renames());
  const auto same = translated(catalog, kModels, {.convention = Convention::kTorchtitan2026, .keep_names = false});
  EXPECT_FALSE(same.hf_rows) << "both have rotary pairs";
  EXPECT_EQ(must(translate(catalog, {false, nullptr}, {"c.json", "not JSON"}, {}, kModels)).model.family, nullptr);
}

TEST(ConversionSteps, WhatTakesNoPartIsCounted) {
  const Catalog catalog = torchtitan();
  Notes notes;
  const Selected model =
      must(select(catalog, {.include = {}, .exclude = {"output*"}, .part = {}}, kModels, false, true, notes));
  EXPECT_THAT(model.tensors, ElementsAre(0, 1, 2));
  EXPECT_TRUE(model.blobs.empty());
  EXPECT_FALSE(model.complete);
  ASSERT_EQ(notes.left_out.size(), 3U);
  EXPECT_EQ(notes.left_out[0].what, "optimizer");
  EXPECT_EQ(notes.left_out[1].bytes, 7);
  EXPECT_EQ(notes.left_out[2].what, "excluded");
  Notes none;
  EXPECT_TRUE(must(select(catalog, {}, kAll, false, true, none)).complete);
  EXPECT_TRUE(none.left_out.empty());
  EXPECT_FALSE(select(catalog, {.include = {"nothing"}, .exclude = {}, .part = {}}, kAll, false, true, none));
}

TEST(ConversionSteps, FaultyTensorsAreLeftOutWhenAllowed) {
  Catalog catalog = torchtitan();
  catalog.tensor(1).fragments = FragmentList(2);
  Notes notes;
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
  Notes notes;
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
  Notes notes;
  const auto padded = [&](const VocabularyRows& rows) -> Result<SourceView> {
    SourceView view = viewed(catalog, kAll, names);
    TRY(pad_vocabulary(view, files, names, rows, {}, kAll, {}, notes));
    return view;
  };
  EXPECT_THAT(padded({{}, 4}).error().message(), HasSubstr("the target's vocabulary 12; --vocab-padding"));
  EXPECT_THAT(padded({VocabularyFill::kZero, 0}).error().message(), HasSubstr("nothing says how many"));
  const SourceView view = must(padded({VocabularyFill::kRepeatLast, 4}));
  EXPECT_EQ(view.catalog.tensors()[*view.catalog.find("output.weight")].shape, (Dims{12, 4}));
  EXPECT_THAT(notes.warnings, ElementsAre(HasSubstr("2 rows (repeat-last) are added to the vocabulary")));
  EXPECT_EQ(notes.repairs.size(), 1U);
}

TEST(ConversionSteps, TensorsArePlacedByTheFamilysRules) {
  const Catalog catalog = torchtitan();
  const Translation names = translated(catalog, kModels);
  const SourceView view = viewed(catalog, kModels, names);
  Notes notes;
  OutputTensors out = must(name_tensors(view, names, {}, notes));
  const OnRanks on{must(Mesh::parse("tp=2")), {}};
  ASSERT_TRUE(place(out.tensors, view, names.model, on, kModels, notes));
  for (const TargetTensor& t : out.tensors) {
    Index elements = 0;
    for (const LocalBox& b : owned_boxes(on.mesh, t.placement, t.shape, 1)) elements += volume(b.box);
    EXPECT_EQ(2 * elements, volume(t.shape)) << t.name;
  }
}

}  // namespace
}  // namespace reshard
