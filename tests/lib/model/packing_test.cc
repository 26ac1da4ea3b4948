// Compares packed tensors with the arithmetic of the frameworks that pack them, element by element.
#include "lib/model/packing.h"

#include <gmock/gmock.h>

#include <map>
#include <random>

#include "lib/model/family_file.h"
#include "lib/model/parameters.h"
#include "lib/model/view.h"

namespace reshard::packing_test {
namespace {

using testing::HasSubstr;

ModelConfig config_of(Index heads, Index kv_heads, Index head_dim, Index experts = 0) {
  ModelConfig config;
  config.path = "config.json";
  config.set("num_attention_heads", heads);
  config.set("num_key_value_heads", kv_heads);
  config.set("head_dim", head_dim);
  config.set("num_experts", experts);
  config.set("num_hidden_layers", 2);
  return config;
}

// Returns a tensor of one-byte elements, row-major from byte 0 of file 0, in fragments cut at random rows.
Tensor stored_tensor(const std::string& name, const Dims& shape, std::mt19937& random) {
  Tensor t;
  t.name = name;
  t.dtype = DType::kUint8;
  t.shape = shape;
  t.fragments = FragmentList(shape.rank());
  const Index row = volume(shape) / std::max<Index>(1, shape[0]);
  for (Index begin = 0; begin < shape[0];) {
    const Index count = std::min<Index>(shape[0] - begin, 1 + static_cast<Index>(random() % 7));
    Box box = whole(shape);
    box.origin[0] = begin;
    box.shape[0] = count;
    t.fragments.add(box, {0, begin * row, count * row});
    begin += count;
  }
  return t;
}

// Returns the file offset of each element, row-major. Every element must have exactly one.
std::vector<Index> places(const Tensor& t) {
  std::vector<Index> out(static_cast<std::size_t>(volume(t.shape)), -1);
  for (std::size_t i = 0; i < t.fragments.size(); ++i) {
    const Fragment f = t.fragments.get(i);
    for (Index n = 0; n < volume(f.box); ++n) {
      Index rest = n, at = 0, to = 0;
      const Dims steps = row_major_strides(t.shape);
      for (int d = f.box.rank() - 1; d >= 0; --d) {
        const Index k = rest % f.box.shape[d];
        rest /= f.box.shape[d];
        at += k * f.strides[d];
        to += (f.box.begin(d) + k) * steps[d];
      }
      EXPECT_EQ(out[static_cast<std::size_t>(to)], -1) << t.name;
      out[static_cast<std::size_t>(to)] = f.extent.offset + f.start + at;
    }
  }
  return out;
}

Catalog view_of(const Family& family, const std::string& name, const Dims& shape, const ModelConfig& config,
                std::mt19937& random) {
  Catalog catalog;
  EXPECT_TRUE(catalog.add(stored_tensor(name, shape, random)));
  auto view = canonical_view(catalog, {&family, &config, true, false}, nullptr);
  EXPECT_TRUE(view) << (view ? "" : view.error().message());
  return view ? *std::move(view) : Catalog();
}

std::vector<Index> places_of(const Catalog& view, const std::string& name) {
  const auto found = view.find(name);
  EXPECT_TRUE(found) << name;
  return found ? places(view.tensors()[*found]) : std::vector<Index>();
}

// megatron/core stores rows by key-value group: the group's query heads, its key, its value.
TEST(Packing, MegatronsQkvIsTakenApartByGroup) {
  std::mt19937 random(1);
  for (const auto& [heads, kv, d, h] : {std::array<Index, 4>{8, 2, 4, 3}, {4, 4, 2, 5}, {6, 1, 3, 2}}) {
    const ModelConfig config = config_of(heads, kv, d);
    const Catalog view = view_of(*find_family("qwen3"), "decoder.layers.1.self_attention.linear_qkv.weight",
                                 {(heads + 2 * kv) * d, h}, config, random);
    std::vector<Index> q, k, v;
    const Index group = heads / kv;
    for (Index g = 0, row = 0; g < kv; ++g) {
      for (Index n = 0; n < group * d; ++n, ++row)
        for (Index c = 0; c < h; ++c) q.push_back(row * h + c);
      for (Index n = 0; n < d; ++n, ++row)
        for (Index c = 0; c < h; ++c) k.push_back(row * h + c);
      for (Index n = 0; n < d; ++n, ++row)
        for (Index c = 0; c < h; ++c) v.push_back(row * h + c);
    }
    EXPECT_EQ(places_of(view, "model.layers.1.self_attn.q_proj.weight"), q);
    EXPECT_EQ(places_of(view, "model.layers.1.self_attn.k_proj.weight"), k);
    EXPECT_EQ(places_of(view, "model.layers.1.self_attn.v_proj.weight"), v);
  }
}

TEST(Packing, GateAndUpAreHalves) {
  std::mt19937 random(2);
  const Catalog view =
      view_of(*find_family("llama"), "decoder.layers.0.mlp.linear_fc1.weight", {12, 5}, config_of(2, 2, 2), random);
  std::vector<Index> gate(30), up(30);
  for (Index i = 0; i < 30; ++i) {
    gate[static_cast<std::size_t>(i)] = i;
    up[static_cast<std::size_t>(i)] = 30 + i;
  }
  EXPECT_EQ(places_of(view, "model.layers.0.mlp.gate_proj.weight"), gate);
  EXPECT_EQ(places_of(view, "model.layers.0.mlp.up_proj.weight"), up);
}

TEST(Packing, StackedExpertsAreSlices) {
  std::mt19937 random(3);
  for (const std::string name : {"layers.3.moe.experts.w2", "layers.3.moe.routed_experts.inner_experts.w2_EDF"}) {
    const Catalog view = view_of(*find_family("qwen3_moe"), name, {5, 3, 4}, config_of(2, 2, 2, 5), random);
    EXPECT_EQ(view.tensors().size(), 5U);
    for (Index e = 0; e < 5; ++e) {
      std::vector<Index> want(12);
      for (Index i = 0; i < 12; ++i) want[static_cast<std::size_t>(i)] = e * 12 + i;
      EXPECT_EQ(places_of(view, "model.layers.3.mlp.experts." + std::to_string(e) + ".down_proj.weight"), want);
    }
  }
}

// transformers 5 stores each expert's gate above its up in memory.
TEST(Packing, StackedSectionsAreHalvesOfSlices) {
  std::mt19937 random(5);
  const std::string layer = "model.layers.3.mlp.experts.";
  const Catalog view =
      view_of(*find_family("qwen3_moe"), layer + "gate_up_proj", {3, 4, 5}, config_of(2, 2, 2, 3), random);
  EXPECT_EQ(view.tensors().size(), 6U);
  for (Index e = 0; e < 3; ++e)
    for (const auto& [part, first] : {std::pair("gate_proj", Index{0}), std::pair("up_proj", Index{10})}) {
      std::vector<Index> want(10);
      for (Index i = 0; i < 10; ++i) want[static_cast<std::size_t>(i)] = e * 20 + first + i;
      EXPECT_EQ(places_of(view, layer + std::to_string(e) + "." + part + ".weight"), want);
    }
}

// Qwen 3 VL MoE has one name for [E, in, out] in files and [E, out, in] in memory.
TEST(Packing, TheShapeSaysWhetherExpertsAreTransposed) {
  std::mt19937 random(6);
  const std::string name = "model.language_model.layers.1.mlp.experts.down_proj";
  ModelConfig config = config_of(2, 2, 2, 3);
  config.set("hidden_size", 4);
  config.set("moe_intermediate_size", 5);
  std::vector<Index> as_it_is, transposed;
  for (Index i = 0; i < 60; ++i) as_it_is.push_back(i);
  for (Index e = 0; e < 3; ++e)
    for (Index in = 0; in < 5; ++in)
      for (Index out = 0; out < 4; ++out) transposed.push_back((e * 4 + out) * 5 + in);
  const Family& family = *find_family("qwen3_vl_moe");
  EXPECT_EQ(places_of(view_of(family, name, {3, 5, 4}, config, random), name), as_it_is);
  const Catalog from_memory = view_of(family, name, {3, 4, 5}, config, random);
  EXPECT_EQ(places_of(from_memory, name), transposed);
  EXPECT_EQ(from_memory.tensors()[0].shape, (Dims{3, 5, 4}));

  const auto error_of = [&](const Dims& shape, const ModelConfig* known) {
    Catalog catalog;
    EXPECT_TRUE(catalog.add(stored_tensor(name, shape, random)));
    const auto view = canonical_view(catalog, {&family, known, true, false}, nullptr);
    return view ? std::string() : view.error().message();
  };
  EXPECT_THAT(error_of({3, 5, 4}, nullptr), HasSubstr("no config.json tells them apart"));
  config.set("moe_intermediate_size", 4);
  EXPECT_THAT(error_of({3, 4, 4}, &config), HasSubstr("[3, 4, 4]: transformers has its last two"));
}

TEST(Packing, TransposedExpertsAreCutWhereTheyLie) {
  const std::string name = "model.language_model.layers.1.mlp.experts.gate_up_proj";
  ModelConfig config = config_of(2, 2, 2, 3);
  config.set("hidden_size", 4);
  config.set("moe_intermediate_size", 5);
  const Family& family = *find_family("qwen3_vl_moe");
  for (const auto& [shape, dim] : {std::pair(Dims{3, 4, 10}, 2), std::pair(Dims{3, 10, 4}, 1)}) {
    const auto parsed = parse_tensor(family, name, shape, &config, name);
    ASSERT_TRUE(parsed && *parsed);
    EXPECT_EQ(tensor_parallel_cut(**parsed).dim, dim);
    EXPECT_EQ(tensor_parallel_cut(**parsed).sections, 2);
  }
}

// GPT-2 stores [in, q | k | v]; Megatron stores [out, in] with the rows of each head's q, k and v together.
TEST(Packing, Gpt2sConvolutionsAreTransposedHeadByHead) {
  std::mt19937 random(4);
  const Index heads = 3, d = 2, h = heads * d;
  const ModelConfig config = config_of(heads, heads, d);
  const std::string layer = "decoder.layers.0.";
  Catalog view = view_of(*find_family("gpt2"), layer + "self_attention.linear_qkv.weight", {3 * h, h}, config, random);
  std::vector<Index> want;
  for (Index in = 0; in < h; ++in)
    for (Index s = 0; s < 3; ++s)
      for (Index n = 0; n < heads; ++n)
        for (Index i = 0; i < d; ++i) want.push_back(((n * 3 + s) * d + i) * h + in);
  EXPECT_EQ(places_of(view, "h.0.attn.c_attn.weight"), want);

  view = view_of(*find_family("gpt2"), layer + "self_attention.linear_qkv.bias", {3 * h}, config, random);
  want.clear();
  for (Index s = 0; s < 3; ++s)
    for (Index n = 0; n < heads; ++n)
      for (Index i = 0; i < d; ++i) want.push_back((n * 3 + s) * d + i);
  EXPECT_EQ(places_of(view, "h.0.attn.c_attn.bias"), want);

  view = view_of(*find_family("gpt2"), layer + "mlp.linear_fc1.weight", {4, 3}, config, random);
  want.clear();
  for (Index in = 0; in < 3; ++in)
    for (Index out = 0; out < 4; ++out) want.push_back(out * 3 + in);
  EXPECT_EQ(places_of(view, "h.0.mlp.c_fc.weight"), want);
}

// The rows of queries and keys in Torchtitan's wqkv are in pairs too.
TEST(Packing, TorchtitansFusedProjectionIsAlsoPaired) {
  std::mt19937 random(5);
  const Index heads = 4, kv = 2, d = 4, group = 2;
  const Catalog view = view_of(*find_family("llama"), "layers.0.attention.qkv_linear.wqkv.weight",
                               {(heads + 2 * kv) * d, 1}, config_of(heads, kv, d), random);
  std::vector<Index> q;
  for (Index n = 0; n < heads; ++n)
    for (Index t = 0; t < 2; ++t)
      for (Index j = 0; j < d / 2; ++j) q.push_back(((n / group) * (group + 2) + n % group) * d + 2 * j + t);
  EXPECT_EQ(places_of(view, "model.layers.0.self_attn.q_proj.weight"), q);
}

// MaxText stores layers along the second axis of [in, heads, head_dim] and [heads, head_dim, out], with rotary pairs in
// llama3.1.
TEST(Packing, AxesAreMovedSplitAndStacked) {
  std::mt19937 random(9);
  constexpr Index kIn = 3, kLayers = 2, kHeads = 4, kDim = 6;
  ModelConfig config = config_of(kHeads, 2, kDim);
  config.set("num_hidden_layers", kLayers);
  const Family& llama = numbered(*find_family("llama"), &config);
  const auto view_as = [&](Convention convention, const std::string& name, const Dims& shape) {
    Catalog catalog;
    EXPECT_TRUE(catalog.add(stored_tensor(name, shape, random)));
    auto view = canonical_view(catalog, {&llama, &config, true, false, false, convention}, nullptr);
    EXPECT_TRUE(view) << (view ? "" : view.error().message());
    return view ? *std::move(view) : Catalog();
  };
  for (const bool pairs : {false, true}) {
    const Catalog view = view_as(pairs ? Convention::kMaxTextInterleaved : Convention::kMaxText,
                                 "decoder.layers.self_attention.query.kernel", {kIn, kLayers, kHeads, kDim});
    for (Index layer = 0; layer < kLayers; ++layer) {
      std::vector<Index> q;
      for (Index h = 0; h < kHeads; ++h)
        for (Index d = 0; d < kDim; ++d)
          for (Index e = 0; e < kIn; ++e) {
            const Index stored = !pairs ? d : d < kDim / 2 ? 2 * d : 2 * (d - kDim / 2) + 1;
            q.push_back(((e * kLayers + layer) * kHeads + h) * kDim + stored);
          }
      EXPECT_EQ(places_of(view, "model.layers." + std::to_string(layer) + ".self_attn.q_proj.weight"), q) << pairs;
    }
  }
  const Catalog view =
      view_as(Convention::kMaxText, "decoder.layers.self_attention.out.kernel", {kHeads, kLayers, kDim, kIn});
  std::vector<Index> o;
  for (Index e = 0; e < kIn; ++e)
    for (Index h = 0; h < kHeads; ++h)
      for (Index d = 0; d < kDim; ++d) o.push_back(((h * kLayers + 1) * kDim + d) * kIn + e);
  EXPECT_EQ(places_of(view, "model.layers.1.self_attn.o_proj.weight"), o);
}

// In MaxText's gpt-oss, gate and up of every second layer, [experts, layers, in, out], are the even and odd columns.
TEST(Packing, ColumnsAlternate) {
  std::mt19937 random(10);
  constexpr Index kExperts = 2, kIn = 3, kOut = 4;
  ModelConfig config = config_of(2, 1, 2, kExperts);
  config.set("num_hidden_layers", 4);
  const Family& family = numbered(*find_family("gpt_oss"), &config);
  Catalog catalog;
  for (const char* name : {"wi_0", "wi_1"})
    EXPECT_TRUE(catalog.add(
        stored_tensor("decoder.layers.layers_1.GptOssMlp." + std::string(name), {kExperts, 2, kIn, kOut}, random)));
  const auto view = canonical_view(catalog, {&family, &config, true, false, false, Convention::kMaxText}, nullptr);
  ASSERT_TRUE(view) << view.error().message();
  std::vector<Index> both;
  for (Index x = 0; x < kExperts; ++x)
    for (Index e = 0; e < kIn; ++e)
      for (Index f = 0; f < 2 * kOut; ++f) both.push_back(((x * 2 + 1) * kIn + e) * kOut + f / 2);
  EXPECT_EQ(places_of(*view, "model.layers.3.mlp.experts.gate_up_proj"), both);
}

// The tensors of pack() unpack into the original tensors.
TEST(Packing, PackingAndUnpackingAreInverse) {
  std::mt19937 random(6);
  const ModelConfig config = config_of(4, 2, 2, 3);
  Catalog model;
  const std::pair<const char*, Dims> kTensors[] = {
      {"model.layers.0.self_attn.q_proj.weight", {8, 6}},
      {"model.layers.0.self_attn.k_proj.weight", {4, 6}},
      {"model.layers.0.self_attn.v_proj.weight", {4, 6}},
      {"model.layers.0.mlp.experts.0.gate_proj.weight", {5, 6}},
      {"model.layers.0.mlp.experts.0.up_proj.weight", {5, 6}},
      {"model.layers.0.mlp.experts.1.gate_proj.weight", {5, 6}},
      {"model.layers.0.mlp.experts.1.up_proj.weight", {5, 6}},
      {"optimizer.state.model.layers.0.mlp.experts.0.gate_proj.weight.exp_avg", {5, 6}},
      {"optimizer.state.model.layers.0.mlp.experts.1.gate_proj.weight.exp_avg", {5, 6}},
      {"optimizer.state.model.layers.0.mlp.experts.0.gate_proj.weight.step", {}},
      {"optimizer.state.model.layers.0.mlp.experts.1.gate_proj.weight.step", {}},
      {"model.norm.weight", {6}},
  };
  std::vector<std::size_t> all;
  for (const auto& [name, shape] : kTensors) {
    Tensor t;
    t.name = name;
    t.shape = shape;
    all.push_back(model.tensors().size());
    ASSERT_TRUE(model.add(std::move(t)));
  }
  const auto groups = pack(*find_family("qwen3_moe"), Convention::kTorchtitan, model, all);
  ASSERT_TRUE(groups) << groups.error().message();
  std::map<std::string, Dims> stored;
  for (const PackedGroup& g : *groups) {
    std::vector<Dims> shapes;
    for (const std::size_t p : g.parts) shapes.push_back(model.tensors()[p].shape);
    stored[g.name] = g.stored && shapes[0].rank() > 0 ? *packed_shape(*g.stored, shapes, nullptr) : shapes[0];
  }
  EXPECT_EQ(stored.at("layers.0.moe.experts.w1"), (Dims{2, 5, 6}));
  EXPECT_EQ(stored.at("layers.0.moe.experts.w3"), (Dims{2, 5, 6}));
  EXPECT_EQ(stored.at("optimizer.state.layers.0.moe.experts.w1.exp_avg"), (Dims{2, 5, 6}));
  EXPECT_EQ(stored.at("optimizer.state.layers.0.moe.experts.w1.step"), Dims{});
  EXPECT_EQ(stored.size(), 8U);
  Catalog packed;
  for (const auto& [name, shape] : stored) {
    Tensor t = shape.rank() > 0 ? stored_tensor(name, shape, random) : Tensor();
    t.name = name;
    ASSERT_TRUE(packed.add(std::move(t)));
  }
  const auto view = canonical_view(packed, {find_family("qwen3_moe"), &config, true, false}, nullptr);
  ASSERT_TRUE(view) << view.error().message();
  EXPECT_EQ(view->tensors().size(), model.tensors().size());
  for (const auto& [name, shape] : kTensors) {
    ASSERT_TRUE(view->find(name)) << name;
    EXPECT_EQ(view->tensors()[*view->find(name)].shape, shape) << name;
  }
}

TEST(Packing, APartThatIsMissingIsNamed) {
  Catalog model;
  for (const char* name : {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.v_proj.weight"}) {
    Tensor t;
    t.name = name;
    t.shape = {4, 4};
    ASSERT_TRUE(model.add(std::move(t)));
  }
  const auto groups = pack(*find_family("llama"), Convention::kMegatron, model, {0, 1});
  ASSERT_FALSE(groups);
  EXPECT_THAT(groups.error().message(), HasSubstr("'model.layers.0.self_attn.k_proj.weight' is missing"));
}

TEST(Packing, ShapesThatDoNotFitAreRefused) {
  std::mt19937 random(7);
  Catalog catalog;
  ASSERT_TRUE(catalog.add(stored_tensor("decoder.layers.0.self_attention.linear_qkv.weight", {15, 2}, random)));
  const ModelConfig config = config_of(4, 2, 2);
  const auto view = canonical_view(catalog, {find_family("llama"), &config, true, false}, nullptr);
  ASSERT_FALSE(view);
  EXPECT_THAT(view.error().message(), HasSubstr("says 16 rows"));
  const auto unknown = canonical_view(catalog, {find_family("llama"), nullptr, true, false}, nullptr);
  ASSERT_FALSE(unknown);
  EXPECT_THAT(unknown.error().message(), HasSubstr("--config"));
  Catalog experts;
  ASSERT_TRUE(experts.add([] {
    Tensor t;
    t.name = "layers.0.moe.experts.w1";
    t.shape = {Index{1} << 40, 0, 1};
    t.fragments = FragmentList(3);
    return t;
  }()));
  const auto many = canonical_view(experts, {find_family("qwen3_moe"), &config, true, false}, nullptr);
  ASSERT_FALSE(many);
  EXPECT_THAT(many.error().message(), HasSubstr("at most 65,536 experts"));
}

TEST(Packing, TensorParallelismCutsPackedTensorsAsTheirFrameworkDoes) {
  const auto cut = [](const Family& family, const char* name) {
    const auto parsed = parse_name(family, name);
    EXPECT_TRUE(parsed) << name;
    return parsed ? tensor_parallel_cut(*parsed) : TensorParallelCut{};
  };
  EXPECT_EQ(cut(*find_family("llama"), "decoder.layers.0.mlp.linear_fc1.weight").sections, 2);
  EXPECT_EQ(cut(*find_family("llama"), "decoder.layers.0.mlp.linear_fc2.weight").dim, 1);
  EXPECT_EQ(cut(*find_family("llama"), "decoder.layers.0.self_attention.linear_qkv.weight").sections, 1);
  EXPECT_EQ(cut(*find_family("llama"), "decoder.layers.0.self_attention.linear_qkv.weight").heads,
            "num_key_value_heads");
  EXPECT_EQ(cut(*find_family("qwen3_moe"), "layers.0.moe.experts.w1").dim, 1);
  EXPECT_EQ(cut(*find_family("qwen3_moe"), "layers.0.moe.experts.w2").dim, 2);
  EXPECT_EQ(cut(*find_family("gpt2"), "decoder.layers.0.self_attention.linear_qkv.weight").dim, 0);
  EXPECT_EQ(cut(*find_family("gpt2"), "decoder.layers.0.self_attention.linear_qkv.weight").sections, 1);
  EXPECT_EQ(cut(*find_family("gpt2"), "decoder.layers.0.self_attention.linear_qkv.bias").dim, 0);
  EXPECT_EQ(cut(*find_family("gpt2"), "decoder.layers.0.mlp.linear_fc2.weight").dim, 1);
}

// ---- families from files

constexpr std::string_view kMine = R"({"reshard_family": 1, "name": "mine", "model_types": ["mine"],
  "defaults": [["num_key_value_heads", "num_attention_heads"]],
  "parameters": [
    {"name": "emb.weight", "shape": "vocab_size, hidden_size", "tp_dim": 0},
    {"name": "b.{}.q.weight", "shape": "num_attention_heads*head_dim, hidden_size", "tp_dim": 0,
     "heads": "num_attention_heads"},
    {"name": "b.{}.g.weight", "shape": "intermediate_size, hidden_size", "tp_dim": 0},
    {"name": "b.{}.u.weight", "shape": "intermediate_size, hidden_size", "tp_dim": 0},
    {"name": "out.weight", "shape": "vocab_size, hidden_size", "place": "last", "tied_to": "emb.weight"}],
  "names": {"megatron": [
    {"stored": "d.{}.fc1", "form": "sections", "parts": ["b.{}.g.weight", "b.{}.u.weight"]},
    {"stored": "d.{}.q", "parts": ["b.{}.q.weight"]}]}})";

TEST(FamilyFile, IsAFamilyLikeTheOthers) {
  const auto family = parse_family(kMine, "mine.json");
  ASSERT_TRUE(family) << family.error().message();
  EXPECT_EQ(family->name, "mine");
  EXPECT_TRUE(family->knows_model_type("mine"));
  EXPECT_TRUE(family->has_convention(Convention::kMegatron));
  EXPECT_FALSE(family->has_convention(Convention::kTorchtitan));
  EXPECT_EQ(rename_key(*family, "b.3.q.weight", Convention::kMegatron), "d.3.q");
  EXPECT_EQ(canonical_key(*family, "d.3.q"), "b.3.q.weight");
  EXPECT_TRUE(parse_name(*family, "d.0.fc1")->is_packed());
  ModelConfig config = config_of(4, 4, 2);
  for (const auto& [name, n] : {std::pair("vocab_size", 10), {"hidden_size", 8}, {"intermediate_size", 6}})
    config.set(name, n);
  const auto all = parameters(*family, config);
  ASSERT_TRUE(all) << all.error().message();
  EXPECT_EQ(all->size(), 8U);
}

TEST(FamilyFile, ExtendsAnother) {
  const auto read = parse_family(R"({"reshard_family": 1, "name": "wide", "extends": "llama", "without": ["*.bias"],
    "parameters": [
      {"name": "model.layers.{}.self_attn.o_proj.weight", "shape": "2*hidden_size, hidden_size"},
      {"name": "model.layers.{}.gain", "shape": "hidden_size"}],
    "names": {"torchtitan, torchtitan-2026": [
                {"stored": "layers.{}.gain", "parts": ["model.layers.{}.gain"]},
                {"stored": "norm.weight", "form": "dropped"}],
              "megatron": null}})",
                                 "wide.json");
  ASSERT_TRUE(read) << read.error().message();
  const Family &wide = *read, &llama = *find_family("llama");
  EXPECT_EQ(wide.title, "wide");
  EXPECT_FALSE(wide.knows_model_type("llama"));
  EXPECT_EQ(wide.rules.size(), llama.rules.size() - 7 + 1);
  EXPECT_EQ(parse_name(wide, "model.layers.0.self_attn.o_proj.weight")->rule->shape, "2*hidden_size, hidden_size");
  EXPECT_FALSE(parse_name(wide, "model.layers.0.mlp.up_proj.bias"));
  EXPECT_FALSE(wide.has_convention(Convention::kMegatron));
  for (const Convention titan : {Convention::kTorchtitan, Convention::kTorchtitan2026}) {
    EXPECT_EQ(rename_key(wide, "model.layers.2.gain", titan), "layers.2.gain");
    EXPECT_EQ(rename_key(wide, "model.norm.weight", titan), "model.norm.weight");
    EXPECT_FALSE(same_row_order(wide, titan, Convention::kHf));
  }
}

TEST(FamilyFile, RowsThatAreInPairsInOneTensorAndNotInAnotherAreRefused) {
  const auto family =
      parse_family(R"({"reshard_family": 1, "name": "torn", "extends": "llama", "names": {"torchtitan": [
      {"stored": "layers.{}.wq", "parts": ["model.layers.{}.self_attn.q_proj.weight"]}]}})",
                   "torn.json");
  ASSERT_FALSE(family);
  EXPECT_THAT(family.error().message(), HasSubstr("in rotary pairs in one tensor and not in another"));
}

TEST(FamilyFile, WhatMakesNoSenseIsNamed) {
  const std::pair<std::string, std::string> kDamage[] = {
      {R"("reshard_family": 1)", R"("reshard_family": 2)"},
      {R"("tied_to": "emb.weight")", R"("tied": "emb.weight")"},
      {R"("form": "sections")", R"("form": "halves")"},
      {R"(["b.{}.g.weight", "b.{}.u.weight"])", R"(["b.{}.g.weight"])"},
      {R"(["b.{}.q.weight"])", R"(["b.{}.x.weight"])"},
      {R"("shape": "intermediate_size, hidden_size")", R"("shape": "intermediate_size +, hidden_size")"},
      {R"("tp_dim": 0)", R"("tp_dim": 2)"},
      {R"("shape": "intermediate_size, hidden_size")", R"("shape": "1, 1, 1, 1, 1, 1, 1, 1, 1")"},
      {R"("name": "b.{}.u.weight")", R"("name": "b.{}.g.weight")"},
      {R"("name": "b.{}.u.weight")", R"("name": "b.{}.{}.{}.weight")"},
      {R"("place": "last")", R"("place": "layer")"},
      {R"("megatron")", R"("hf")"},
      {R"("name": "mine")", R"("name": "")"},
      {R"("name": "mine")", R"("name": "mine", "extends": "nobody")"},
      {R"("name": "mine")", R"("name": "mine", "without": ["q.*"])"},
      {R"(, "tied_to": "emb.weight")", R"(, "dropped": true)"},
  };
  for (const auto& [good, bad] : kDamage) {
    std::string text(kMine);
    ASSERT_NE(text.find(good), std::string::npos) << good;
    text.replace(text.find(good), good.size(), bad);
    const auto family = parse_family(text, "mine.json");
    ASSERT_FALSE(family) << bad;
    EXPECT_THAT(family.error().message(), HasSubstr("mine.json")) << bad;
  }
  for (std::size_t n = 0; n < kMine.size(); ++n) EXPECT_FALSE(parse_family(kMine.substr(0, n), "cut.json")) << n;
}

}  // namespace
}  // namespace reshard::packing_test
