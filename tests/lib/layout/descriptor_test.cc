#include "lib/layout/descriptor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lib/base/text.h"
#include "tests/support/checkpoints.h"
#include "tests/support/layouts.h"
#include "tests/support/soak.h"

namespace reshard::descriptor_test {
namespace {

using testing::HasSubstr;

Error error_of(std::string_view text) {
  const auto layout = LayoutDescriptor::parse(text, "l.json");
  return layout ? Error(ErrorCode::kInternal, "it was read") : layout.error();
}

LayoutDescriptor must_parse(std::string_view text) {
  auto layout = LayoutDescriptor::parse(text, "l.json");
  EXPECT_TRUE(layout.has_value()) << layout.error().message();
  return layout ? *std::move(layout) : LayoutDescriptor();
}

// Returns a descriptor with these members, a version, a name, files and a rule for everything.
std::string with(const std::string& members, const std::string& tensors = R"([{"names": ["*"], "splits": []}])") {
  return R"({"reshard_layout": 1, "name": "t", "files": "shards", "tensors": )" + tensors +
         (members.empty() ? "" : ", " + members) + "}";
}
std::string with_rule(const std::string& splits) { return with("", R"([{"names": ["*"], "splits": )" + splits + "}]"); }

LayoutDescriptor builtin(std::string_view name, std::string_view mesh = "") {
  const BuiltinLayout* found = find_builtin_layout(name);
  EXPECT_NE(found, nullptr) << name;
  const LayoutDescriptor layout = must_parse(found->text);
  return mesh.empty() ? layout : *layout.with_mesh(*Mesh::parse(mesh));
}

std::string place_error(const LayoutDescriptor& layout, std::string_view tensor, const Dims& shape, Index layers = 0) {
  const auto placement = layout.place(tensor, shape, layers);
  return placement ? "it was placed" : placement.error().message();
}

// ---- reading

TEST(LayoutDescriptor, ReadsEveryMember) {
  const LayoutDescriptor layout = must_parse(R"({
    "reshard_layout": 1, "name": "all", "description": "of it",
    "mesh": [{"axis": "dp_shard", "size": 2}, {"axis": "pp", "size": 2}, {"axis": "tp", "size": 4}, {"axis": "ep", "size": 1}],
    "files": "shards",
    "tensors": [{"names": ["a.{0..3}.*", "b"], "splits": [{"axes": ["tp"], "dim": 1, "groups": 3},
                                                         {"axes": ["dp_shard", "cp"], "dim": 0}]}],
    "vocabulary": {"tensors": ["b"], "size": 1000, "make_vocab_size_divisible_by": 64, "padded_size": 1024,
                   "padding": "zero"},
    "pipeline": {"stages": [["a.*"], []]},
    "kv_heads": {"tensors": ["k"], "replication": 2},
    "evidence": [{"about": "tp=4", "confidence": "likely", "because": "it looks like it"}],
    "notes": ["A note."]})");
  EXPECT_EQ(layout.mesh->to_string(), "dp_shard=2, pp=2, tp=4") << "in the order given";
  EXPECT_EQ(layout.tensors,
            (std::vector<TensorRule>{{{"a.{0..3}.*", "b"}, {{{"tp"}, 1, 3}, {{"dp_shard", "cp"}, 0, 1}}}}));
  EXPECT_EQ(layout.vocabulary, (Vocabulary{{"b"}, 1000, 64, 1024, PaddingContent::kZero}));
  EXPECT_EQ(layout.pipeline->stages, (std::vector<std::vector<std::string>>{{"a.*"}, {}}));
  EXPECT_EQ(layout.kv_heads->replication, 2);
  EXPECT_EQ(layout.evidence[0].because, "it looks like it");
  EXPECT_EQ(must_parse(to_text(layout.to_json(), 2)), layout);
}

TEST(LayoutDescriptor, WhatIsWrongIsNamedByItsMember) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"", "l.json"},
      {"[]", "l.json: expected an object, got an array"},
      {"{}", "l.json: reshard_layout: expected an integer, got nothing"},
      {R"({"reshard_layout": 2})", "l.json: reshard_layout: expected version 1, got 2"},
      {with(R"("mehs": [])"),
       "l.json: member 'mehs' is unknown; did you mean mesh? Choose one of: reshard_layout, name, "},
      {R"({"reshard_layout": 1, "files": "shards", "tensors": []})", "l.json: name: expected a string, got nothing"},
      {R"({"reshard_layout": 1, "name": "", "files": "shards", "tensors": []})", "l.json: name: expected a name"},
      {R"({"reshard_layout": 1, "name": "x", "files": "both", "tensors": []})",
       "l.json: files: expected shards or whole, got 'both'"},
      {with(R"("mesh": [{"axis": "zz", "size": 2}])"),
       "l.json: mesh: axis: expected one of pp, dp_replicate, dp_shard, cp, tp, ep, got 'zz'"},
      {with(R"("mesh": [{"axis": "tp", "size": 2}, {"axis": "tp", "size": 1}])"),
       "l.json: mesh: axis 'tp' is listed twice"},
      {with(R"("mesh": [{"axis": "tp", "size": 0}])"),
       "l.json: mesh: tp: size: expected a number from 1 to 1,000,000, got 0"},
      {with(R"("mesh": [{"axis": "tp", "size": 2.5}])"), "l.json: mesh: tp: size: expected an integer"},
      {with(R"("mesh": [{"axis": "tp", "size": 100000}, {"axis": "cp", "size": 100000}])"),
       "l.json: mesh: expected at most 1,000,000 ranks"},
      {with(R"("mesh": {"tp": 2})"), "l.json: mesh: expected an array, got an object"},
      {with("", R"([{"names": [], "splits": []}])"), "l.json: tensors[0]: names: expected at least one pattern"},
      {with("", R"([{"names": [""], "splits": []}])"),
       "l.json: tensors[0]: names[0]: expected a pattern, got an empty string"},
      {with("", R"([{"names": ["*"]}])"), "l.json: tensors[0]: splits: expected an array, got nothing"},
      {with("", R"([{"names": ["*"], "splits": [], "placement": 1}])"),
       "l.json: tensors[0]: member 'placement' is unknown; choose one of: names, splits"},
      {with_rule(R"([{"axes": ["tp"], "dim": 0}, {"axes": ["dp_shard", "tp"], "dim": 1}])"),
       "l.json: tensors[0]: splits[1]: axes: axis 'tp' cuts this tensor twice"},
      {with_rule(R"([{"axes": ["pp"], "dim": 0}])"),
       "l.json: tensors[0]: splits[0]: axes[0]: expected one of dp_shard, cp, tp, ep, got 'pp'"},
      {with_rule(R"([{"axes": [], "dim": 0}])"), "l.json: tensors[0]: splits[0]: axes: expected at least one axis"},
      {with_rule(R"([{"axes": ["tp"], "dim": 8}])"),
       "l.json: tensors[0]: splits[0]: dim: expected a number from 0 to 7, got 8"},
      {with_rule(R"([{"axes": ["tp"], "dim": -1}])"),
       "l.json: tensors[0]: splits[0]: dim: expected a number from 0 to 7, got -1"},
      {with_rule(R"([{"axes": ["tp"], "dim": 0, "groups": 65}])"),
       "l.json: tensors[0]: splits[0]: groups: expected a number from 1 to 64, got 65"},
      {with_rule(R"([{"axes": ["tp"], "dim": 0, "groups": 9}, {"axes": ["cp"], "dim": 1, "groups": 8}])"),
       "l.json: tensors[0]: splits[1]: groups: expected a product of at most 64 for one tensor"},
      {with_rule(R"([{"axes": ["tp"], "dim": 0}, {"axes": ["cp"], "dim": 0, "groups": 2}])"),
       "l.json: tensors[0]: splits[1]: groups: dimension 0 has sections but was cut by an earlier split; put this "
       "split first"},
      {with(R"("vocabulary": {"tensors": ["*"], "size": 0})"),
       "l.json: vocabulary: size: expected a number from 1 to 1,099,511,627,776, got 0"},
      {with(R"("vocabulary": {"tensors": ["*"], "size": 100, "padded_size": 99})"),
       "l.json: vocabulary: padded_size: expected at least size, 100, got 99"},
      {with(R"("mesh": [{"axis": "tp", "size": 8}], "vocabulary": {"tensors": ["*"], "size": 128256,
               "make_vocab_size_divisible_by": 64, "padded_size": 128256})"),
       "l.json: vocabulary: padded_size: expected 128,512, the next multiple of 64 x tp 8, got 128,256"},
      {with(R"("vocabulary": {"tensors": ["*"], "padding": "ones"})"),
       "l.json: vocabulary: padding: expected zero, initialised or unknown, got 'ones'"},
      {with(R"("pipeline": {})"), "l.json: pipeline: expected one of rule and stages, got both or neither"},
      {with(R"("pipeline": {"rule": "odd", "first": [], "last": []})"),
       "l.json: pipeline: rule: expected torchtitan, colossalai or even, got 'odd'"},
      {with(R"("pipeline": {"stages": [["*"]], "first": []})"),
       "l.json: pipeline: member 'first' is unknown; choose one of: stages"},
      {with(R"("mesh": [{"axis": "pp", "size": 3}], "pipeline": {"stages": [["a"], ["b"]]})"),
       "l.json: pipeline: stages: expected pp = 3 lists, got 2"},
      {with(R"("kv_heads": {"tensors": [], "replication": 0})"),
       "l.json: kv_heads: replication: expected a number from 1"},
      {with(R"("evidence": [{"about": "", "confidence": "sure", "because": ""}])"),
       "l.json: evidence[0]: confidence: expected certain, likely or unknown, got 'sure'"},
      {with(R"("notes": [1])"), "l.json: notes[0]: expected a string, got an integer"},
      {with(R"("name": "again")"), "duplicate key 'name'"},
      {with("\"\x1b[2J\": 1"), "l.json"},
  };
  for (const auto& [text, message] : bad) {
    const Error error = error_of(text);
    EXPECT_THAT(error.message(), HasSubstr(message)) << text;
    EXPECT_TRUE(error.code() == ErrorCode::kCorrupt || error.code() == ErrorCode::kUnsupported) << text;
  }
}

TEST(LayoutDescriptor, MorePatternsThanAnyModelNeedsAreRefused) {
  const std::string rule = R"({"names": [")" + std::string(1000, 'x') + R"("], "splits": []})";
  std::string rules = rule;
  for (int i = 1; i < 262; ++i) rules += "," + rule;
  EXPECT_EQ(must_parse(with("", "[" + rules + "]")).tensors.size(), 262u);
  EXPECT_EQ(error_of(with("", "[" + rules + "," + rule + "]")).message(),
            "l.json: tensors[262]: names[0]: expected at most 262,144 bytes of patterns in all, got 263,000");
}

TEST(LayoutDescriptor, HostilePatternsAreMatchedInBoundedTime) {
  std::string ranges = "*{1";
  while (ranges.size() < 262'000) ranges += ",1";
  const LayoutDescriptor layout =
      must_parse(with(R"("mesh": [])", R"([{"names": [")" + ranges + R"(}x"], "splits": []}])"));
  for (int i = 0; i < 200; i += every_nth(10))
    EXPECT_FALSE(layout.place("layers.22.attention.33.w", {4}, 0).has_value());
}

TEST(LayoutDescriptor, NoDamageToATextCrashesOrChangesItUnseen) {
  const std::string text = read_file(std::string(RESHARD_SOURCE_DIR) + "/samples/layouts/megatron-llama.json");
  const LayoutDescriptor original = must_parse(text);
  Rng rng(5);
  Index refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string damaged = text;
    const auto at = static_cast<std::size_t>(below(rng, static_cast<Index>(text.size())));
    if (i % 3 == 0)
      damaged.resize(at);
    else
      damaged[at] = static_cast<char>(i % 3 == 1 ? damaged[at] ^ (1 << below(rng, 8)) : "0{}[]\",:9"[below(rng, 9)]);
    const auto layout = LayoutDescriptor::parse(damaged, "l.json");
    if (!layout) {
      ++refused;
      continue;
    }
    EXPECT_EQ(must_parse(to_text(layout->to_json())), *layout);
  }
  EXPECT_GT(refused, 1500);
}

// Random descriptors survive being written and read.
TEST(LayoutDescriptor, WhatIsWrittenReadsBackEqual) {
  Rng rng(6);
  for (int i = 0; i < 500; ++i) {
    LayoutDescriptor d;
    d.name = "n" + std::to_string(i);
    if (below(rng, 3) != 0) {
      std::vector<MeshAxis> axes = random_mesh(rng).axes();
      std::erase_if(
          axes, [](const MeshAxis& a) { return a.size == 1; });  // axes of size 1 carry no information and are dropped
      d.mesh = Mesh(std::move(axes));
    }
    for (Index r = below(rng, 4); r >= 0; --r) {
      TensorRule rule{{"p" + std::to_string(r), "\"\\*{0..3}\xc3\xa9"}, {}};
      for (Split& s : random_placement(rng, d.mesh.value_or(Mesh()), {4, 4}).splits)
        if (std::find(s.axes.begin(), s.axes.end(), "dp_replicate") == s.axes.end()) rule.splits.push_back(s);
      if (!rule.splits.empty() && below(rng, 3) == 0) rule.splits[0].groups = 1 + below(rng, 8);
      d.tensors.push_back(std::move(rule));
    }
    if (below(rng, 2) != 0) d.vocabulary = Vocabulary{{"v"}, 1 + below(rng, 99), {}, 100, PaddingContent::kInitialised};
    if (below(rng, 3) == 0) d.pipeline = Pipeline{StageRule::kEven, {"f"}, {"l"}, {}};
    ASSERT_EQ(must_parse(to_text(d.to_json(), static_cast<int>(below(rng, 3)))), d) << to_text(d.to_json());
  }
}

// ---- placing

TEST(LayoutDescriptor, TheFirstPatternThatMatchesCounts) {
  const LayoutDescriptor layout = must_parse(with(R"("mesh": [{"axis": "tp", "size": 2}])", R"([
      {"names": ["layers.{0..3}.w"], "splits": [{"axes": ["tp"], "dim": 1}]},
      {"names": ["layers.*"], "splits": [{"axes": ["tp"], "dim": 0}]}])"));
  EXPECT_EQ(layout.place("layers.3.w", {4, 4}, 0)->splits[0].dim, 1);
  EXPECT_EQ(layout.place("layers.4.w", {4, 4}, 0)->splits[0].dim, 0);
  EXPECT_TRUE(layout.place("layers.4.step", {}, 0)->splits.empty()) << "a scalar cannot be cut";
  EXPECT_EQ(place_error(layout, "head", {4, 4}),
            "layout 't': tensor 'head' [4, 4]: the layout has no pattern for this name; add a rule "
            "for it");
  EXPECT_EQ(place_error(layout, "layers.0.w", {4}),
            "layout 't': tensor 'layers.0.w' [4]: the layout cuts dimension 1, which does not exist");
}

TEST(LayoutDescriptor, SectionsHaveToComeOutEven) {
  const LayoutDescriptor layout =
      must_parse(with(R"("mesh": [{"axis": "tp", "size": 2}])",
                      R"([{"names": ["*"], "splits": [{"axes": ["tp"], "dim": 1, "groups": 3}]}])"));
  EXPECT_EQ(owned_boxes(*layout.mesh, *layout.place("c_attn", {8, 24}, 0), {8, 24}, 1).size(), 3u);
  EXPECT_EQ(place_error(layout, "c_attn", {8, 25}),
            "layout 't': tensor 'c_attn' [8, 25]: dimension 1: the layout expects 3 equal sections, got 25 "
            "elements");
}

TEST(LayoutDescriptor, StagesComeFromListsOrRules) {
  const LayoutDescriptor listed = must_parse(with(
      R"("mesh": [{"axis": "pp", "size": 2}], "pipeline": {"stages": [["layers.{0..1}.*"], ["layers.*", "norm"]]})"));
  EXPECT_EQ(listed.place("layers.1.w", {4}, 0)->stage, 0);
  EXPECT_EQ(listed.place("layers.2.w", {4}, 0)->stage, 1);
  EXPECT_EQ(listed.place("step", {}, 0)->stage, -1);

  const LayoutDescriptor titan = builtin("torchtitan-llama", "pp=4,tp=2");
  EXPECT_EQ(titan.place("tok_embeddings.weight", {64, 8}, 32)->stage, 0);
  EXPECT_EQ(titan.place("layers.7.attention.wq.weight", {8, 8}, 32)->stage, 0);
  EXPECT_EQ(titan.place("layers.8.attention_norm.weight", {8}, 32)->stage, 1);
  EXPECT_EQ(titan.place("norm.weight", {8}, 32)->stage, 3);
  EXPECT_EQ(titan.place("optimizer.state.norm.weight.exp_avg", {8}, 32)->stage, 3);
  EXPECT_EQ(place_error(titan, "layers.0.attention.wq.weight", {8, 8}, 1),
            "layout 'torchtitan-llama': pp=4 exceeds the parts of the model: 1 layer, the embedding and the "
            "head");
}

TEST(LayoutDescriptor, PaddingRowsThatTheTensorHasNotAreUnsupported) {
  // Llama 3 under ColossalAI's and Megatron's rules, with files of shards.
  const std::string vocabulary =
      R"("mesh": [{"axis": "tp", "size": 8}], "vocabulary": {"tensors": ["emb"], "make_vocab_size_divisible_by": 64})";
  const LayoutDescriptor layout = must_parse(with(vocabulary));
  EXPECT_EQ(*layout.padded_rows(128256), 128512);
  EXPECT_EQ(layout.place("emb", {128256, 8}, 0).error().code(), ErrorCode::kUnsupported);
  EXPECT_EQ(place_error(layout, "emb", {128256, 8}),
            "layout 't': tensor 'emb' [128256, 8]: the layout pads the vocabulary to 128,512 rows, but the tensor has "
            "128,256; the missing rows would have to be invented");
  EXPECT_TRUE(layout.place("emb", {128512, 8}, 0).has_value());
  EXPECT_TRUE(layout.place("other", {128256, 8}, 0).has_value());

  LayoutDescriptor told = layout;
  told.vocabulary->size = 128256;
  EXPECT_TRUE(told.place("emb", {128512, 8}, 0).has_value()) << "padded as it should be";
  EXPECT_EQ(place_error(told, "emb", {129024, 8}),
            "layout 't': tensor 'emb' [129024, 8]: expected at most 128,512 vocabulary rows, got 129,024");
  LayoutDescriptor whole = layout;
  whole.stored_as = StoredAs::kWhole;
  EXPECT_TRUE(whole.place_in_files("emb", {128256, 8}, 0).has_value()) << "the files hold no padding";
}

TEST(LayoutDescriptor, AMeshIsGivenOnce) {
  const LayoutDescriptor open = builtin("torchtitan-llama");
  EXPECT_FALSE(open.mesh.has_value());
  EXPECT_EQ(place_error(open, "norm.weight", {8}), "layout 'torchtitan-llama' has no mesh; add one with --mesh");
  const LayoutDescriptor meshed = *open.with_mesh(*Mesh::parse("tp=2"));
  EXPECT_EQ(meshed.with_mesh(Mesh()).error().message(),
            "layout 'torchtitan-llama' already has the mesh tp=2; drop --mesh one rank");
  const LayoutDescriptor staged = must_parse(with(R"("pipeline": {"stages": [["a"], ["b"]]})"));
  EXPECT_EQ(staged.with_mesh(*Mesh::parse("pp=3")).error().code(), ErrorCode::kUsage);
}

// ---- the built-in ones

TEST(BuiltinLayouts, AreTheSampleFiles) {
  std::vector<std::string> names;
  for (const BuiltinLayout& layout : builtin_layouts()) {
    names.emplace_back(layout.name);
    EXPECT_EQ(must_parse(layout.text).name, layout.name);
    EXPECT_EQ(read_file(std::string(RESHARD_SOURCE_DIR) + "/samples/layouts/" + names.back() + ".json"), layout.text);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"colossalai-llama", "hf", "megatron-llama", "torchtitan-llama"}));
  EXPECT_EQ(find_builtin_layout("gpt"), nullptr);
}

TEST(BuiltinLayouts, TorchtitanCutsForTensorParallelismFirst) {
  const LayoutDescriptor layout = builtin("torchtitan-llama", "dp_shard=2,tp=2");
  const auto boxes = [&](std::string_view name, const Dims& shape, Index rank) {
    return *owned(*layout.mesh, *layout.place(name, shape, 4), shape, rank);
  };
  EXPECT_EQ(boxes("layers.0.attention.wq.weight", {16, 4}, 1), (Box{{8, 0}, {4, 4}}));
  EXPECT_EQ(boxes("layers.0.attention.qkv_linear.wk.weight", {16, 4}, 1), (Box{{8, 0}, {4, 4}}));
  EXPECT_EQ(boxes("optimizer.state.layers.0.feed_forward.w2.weight.exp_avg", {16, 4}, 1), (Box{{0, 2}, {8, 2}}));
  EXPECT_EQ(boxes("model.layers.3.ffn_norm.weight", {16}, 3), (Box{{8}, {8}}));
  EXPECT_TRUE(layout.place("optimizer.state.layers.0.feed_forward.w2.weight.step", {}, 4)->splits.empty());
}

TEST(BuiltinLayouts, MegatronCutsGateAndUpAsSections) {
  const LayoutDescriptor layout = builtin("megatron-llama", "tp=2");
  const Dims shape = {16, 4};
  const auto fc1 =
      owned_boxes(*layout.mesh, *layout.place("decoder.layers.0.mlp.linear_fc1.weight", shape, 4), shape, 0);
  EXPECT_EQ(fc1, (std::vector<LocalBox>{{{{0, 0}, {4, 4}}, {0, 0}}, {{{8, 0}, {4, 4}}, {4, 0}}}));
  EXPECT_EQ(*layout.padded_rows(50257), 50432);
}

TEST(BuiltinLayouts, ColossalaiPadsTheVocabularyOnRanksAndNotInFiles) {
  const LayoutDescriptor layout = builtin("colossalai-llama", "tp=8");
  struct Row {
    Index rows, tp, padded;
  };
  for (const Row& r : {Row{128256, 8, 128512}, Row{128256, 4, 128256}, Row{32000, 8, 32256}, Row{32000, 16, 32768},
                       Row{151936, 16, 152576}, Row{50257, 2, 50304}, Row{50257, 4, 50432}, Row{50, 2, 128}})
    EXPECT_EQ(*builtin("colossalai-llama", "tp=" + std::to_string(r.tp)).padded_rows(r.rows), r.padded);
  EXPECT_EQ(layout.place("model.embed_tokens.weight", {128256, 8}, 1).error().code(), ErrorCode::kUnsupported);
  EXPECT_TRUE(layout.place_in_files("model.embed_tokens.weight", {128256, 8}, 1)->splits.empty());
}

TEST(BuiltinLayouts, HuggingFaceFilesHoldWholeTensors) {
  const LayoutDescriptor layout = builtin("hf");
  EXPECT_EQ(layout.mesh, Mesh());
  EXPECT_EQ(layout.stored_as, StoredAs::kWhole);
  EXPECT_EQ(*layout.place("anything at all", {4, 4}, 0), Placement());
}

}  // namespace
}  // namespace reshard::descriptor_test
