// Tests the exact output of reshard verify for each kind of fault (tests/support/golden.h). Checkpoints of real models
// are full-length files without data (synth --headers-only); small ones are damaged copies of the samples.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>

#include "formats/dcp/metadata.h"
#include "formats/open.h"
#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/checkpoint/state_key.h"
#include "tests/support/audit_workshop.h"
#include "tests/support/dcp_metadata.h"
#include "tests/support/golden.h"
#include "tests/support/soak.h"

namespace reshard::audit_golden_test {
namespace {

namespace fs = std::filesystem;

TensorValue& value(TensorValues& values, const std::string& name) { return values.at(name); }

// Fills some rows of a bfloat16 matrix with one value, given as its two bytes.
void fill_rows(TensorValue& tensor, Index begin, Index end, std::uint16_t bits) {
  const Index row = tensor.shape[1] * 2;
  for (Index at = begin * row; at < end * row; at += 2) std::memcpy(tensor.bytes.data() + at, &bits, 2);
}

// Returns a checkpoint with a vocabulary of 257 tokens and 384 rows (3 x 128), and `head` rows for the head.
TensorValues padded(Index head) {
  TensorValues values = tp8();
  for (const auto& [name, rows] : {std::pair("tok_embeddings.weight", Index{384}), std::pair("output.weight", head)}) {
    TensorValue& t = value(values, name);
    t.shape[0] = rows;
    t.bytes.resize(static_cast<std::size_t>(rows * t.shape[1] * 2), '\0');
  }
  return values;
}

// Removes the pieces of one file from the metadata, as if its rank had died before it wrote.
void silence(const Workshop& w, const std::string& file) {
  const auto open = open_checkpoint(w / "ck");
  const Catalog& catalog = open->reader->catalog();
  std::vector<std::string> names;
  for (const CatalogFile& f : catalog.files) names.push_back(f.path);
  std::vector<TargetTensor> tensors(catalog.tensors().size());
  std::vector<dcp::WrittenEntry> entries;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = catalog.tensors()[i];
    tensors[i] = {t.name, t.dtype, t.shape, {}, {}};
    dcp::WrittenEntry entry{&tensors[i], t.name, {}, {}};
    for (std::size_t k = 0; k < t.fragments.size(); ++k) {
      const Extent e = t.fragments.extent(k);
      if (names[e.file] != file) entry.items.push_back({t.fragments.box(k), e.file, e.offset, e.length});
    }
    entries.push_back(std::move(entry));
  }
  write_file(w / "ck/.metadata", dcp::write_metadata(entries, names));
  fs::remove(w / ("ck/" + file));
}

// Returns torchtitan's rules for Llama on dp_shard x tp, with the given rules for `wo` and `w1` and order of the two
// cuts.
std::string llama_layout(const std::string& mesh, const std::string& rules) {
  return R"({"reshard_layout": 1, "name": "as-it-ran", "files": "shards", "mesh": )" + mesh + R"(, "tensors": [)" +
         rules + "]}";
}
constexpr const char* kTp8 = R"([{"axis": "tp", "size": 8}])";
constexpr const char* kFsdp4Tp2 = R"([{"axis": "dp_shard", "size": 4}, {"axis": "tp", "size": 2}])";

std::string tp_on(const std::string& names, int dim) {
  return R"({"names": [)" + names + R"(], "splits": [{"axes": ["tp"], "dim": )" + std::to_string(dim) + "}]}";
}
std::string tp_then_fsdp(const std::string& names, int dim) {
  return R"({"names": [)" + names + R"(], "splits": [{"axes": ["tp"], "dim": )" + std::to_string(dim) +
         R"(}, {"axes": ["dp_shard"], "dim": 0}]})";
}
std::string fsdp_then_tp(const std::string& names) {
  return R"({"names": [)" + names + R"(], "splits": [{"axes": ["dp_shard"], "dim": 0}, {"axes": ["tp"], "dim": 0}]})";
}

struct Golden {
  const char* name;
  std::function<void(const Workshop&)> prepare;
  Options options;
  int exit_code = 1;
};

void PrintTo(const Golden& g, std::ostream* out) { *out << g.name; }

class AuditGolden : public testing::TestWithParam<Golden> {};

TEST_P(AuditGolden, SaysThis) {
  const Golden& g = GetParam();
  const Workshop w;
  g.prepare(w);
  Options options = {"verify", "ck", "--threads", "1"};
  options.insert(options.end(), g.options.begin(), g.options.end());
  const CommandResult r = w.run(options);
  EXPECT_EQ(r.exit_code, g.exit_code) << r.err;
  EXPECT_EQ(r.err, "");
  expect_golden(std::string("audit_") + g.name + ".txt", without_times(r.out));
}

std::string title(const testing::TestParamInfo<Golden>& param) { return param.param.name; }

// ---- the same under what trainers put around names

// Returns the name with `wrapper` before the parameter in it. Only wrappers of modules also occur inside names of
// optimizer state.
std::string wrapped(const std::string& name, const std::string& wrapper) {
  const StateKey key = split_state_key(name);
  if (key.kind == StateKind::kModel) return wrapper + name;
  const bool is_module = wrapper.ends_with("module.") || wrapper.ends_with("_orig_mod.");
  return is_module && !key.parameter.empty() ? key.prefix + wrapper + key.parameter + key.suffix : name;
}

// Rewrites the metadata of a DCP directory with `wrapper` before all names. Its data files contain no names.
void wrap_dcp(const std::string& metadata, const std::string& directory, const std::string& wrapper) {
  OpenOptions how{.files_too = false, .validated = false};
  const auto open = open_checkpoint(directory, how);
  if (!open) FAIL() << open.error().message();
  const Catalog& catalog = open->reader->catalog();
  std::vector<std::string> files;
  for (const CatalogFile& f : catalog.files) files.push_back(f.path);
  std::vector<TargetTensor> tensors(catalog.tensors().size());
  std::vector<dcp::WrittenEntry> entries;
  const auto add = [&](const TargetTensor* tensor, const std::string& name) -> dcp::WrittenEntry& {
    return entries.emplace_back(dcp::WrittenEntry{tensor, wrapped(name, wrapper), {}, {}});
  };
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = catalog.tensors()[i];
    tensors[i] = {t.name, t.dtype, t.shape, {}, {}};
    dcp::WrittenEntry& entry = add(&tensors[i], t.name);
    for (const FragmentList* list : {&t.fragments, &t.replicas})
      for (std::size_t k = 0; k < list->size(); ++k) {
        const Extent e = list->extent(k);
        entry.items.push_back({list->box(k), e.file, e.offset, e.length});
      }
  }
  for (const Blob& b : catalog.blobs)
    add(nullptr, b.name).items.push_back({{}, b.extent.file, b.extent.offset, b.extent.length});
  write_file(metadata, dcp::write_metadata(entries, files));
}

// Writes a safetensors file with `wrapper` before all names. Large files consist of holes, which need no copy.
void wrap_safetensors(const std::string& from, const std::string& to, const std::string& wrapper) {
  std::ifstream in(from, std::ios::binary);
  std::uint64_t length = 0;
  in.read(reinterpret_cast<char*>(&length), 8);
  std::string header(length, '\0');
  in.read(header.data(), static_cast<std::streamsize>(length));
  const std::uintmax_t data = fs::file_size(from) - 8 - length;
  header = std::regex_replace(header, std::regex(R"re("([^"]+)":(\{"(dtype|shape|data_offsets)))re"),
                              "\"" + wrapper + "$1\":$2");
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::uint64_t now = header.size();
  std::string bytes(reinterpret_cast<const char*>(&now), 8);
  bytes += header;
  if (data < 64'000'000) bytes += std::string(std::istreambuf_iterator<char>(in), {});
  write_file(to, bytes);
  fs::resize_file(to, 8 + now + data);
}

// Copies a checkpoint and puts `wrapper` before the names of its tensors.
void wrap_names(const std::string& from, const std::string& to, const std::string& wrapper) {
  fs::create_directory(to);
  std::string metadata;
  for (const auto& entry : fs::directory_iterator(from)) {
    const std::string path = entry.path().string(), name = entry.path().filename().string(), copy = to + "/" + name;
    if (name == "model.safetensors.index.json")
      write_file(copy, std::regex_replace(read_file(path), std::regex(R"re("([^"]+)"(: *"model-))re"),
                                          "\"" + wrapper + "$1\"$2"));
    else if (name.ends_with(".safetensors"))
      wrap_safetensors(path, copy, wrapper);
    else if (name == ".metadata")
      metadata = copy;
    else
      fs::create_hard_link(path, copy);
  }
  if (!metadata.empty()) wrap_dcp(metadata, from, wrapper);
}

std::string without_all(std::string text, const std::string& part) {
  for (std::size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, part.size());
  return text;
}

// Returns the part of verify's output that must not depend on a wrapper around names: exit code, findings with
// severities, checks with counts.
std::string told(const CommandResult& r, const std::string& wrapper) {
  const auto parsed = parse_json(r.out, "out");
  std::string out = "exit code " + std::to_string(r.exit_code) + "\n";
  if (!parsed) return out + r.err + r.out;
  for (const char* list : {"findings", "checks"}) {
    const auto items = parsed->get_array(list);
    for (const Json& item : *items) out += to_text(item) + "\n";
  }
  return without_all(std::move(out), wrapper);
}

// An audit of wrapped names gives the same result as one of bare names.
TEST_P(AuditGolden, SaysTheSameOfWrappedNames) {
  const Golden& g = GetParam();
  const Workshop w;
  g.prepare(w);
  const std::set<std::string> others = {"save_interrupted", "adapter_beside", "hsdp_was_fsdp_405b"};
  if (others.contains(g.name)) return;  // damage of files, not of names; a smaller golden covers the same kind
  Options options = {"verify", "ck", "--threads", "1", "--json"};
  options.insert(options.end(), g.options.begin(), g.options.end());
  const CommandResult bare = w.run(options);
  fs::rename(w / "ck", w / "bare");
  const std::string wrappers[] = {"model.", "app.model.", "_orig_mod."};
  const auto step = static_cast<std::size_t>(every_nth(3));  // a different one for each golden
  for (std::size_t i = std::string_view(g.name).size() % step; i < std::size(wrappers); i += step) {
    const std::string& wrapper = wrappers[i];
    wrap_names(w / "bare", w / "ck", wrapper);
    EXPECT_EQ(told(w.run(options), wrapper), told(bare, wrapper)) << wrapper;
    fs::remove_all(w / "ck");
  }
}

const Options kConfig = {"--config", "config.json"};

// Kinds 1 and 2: the vocabulary.
INSTANTIATE_TEST_SUITE_P(
    Vocabulary, AuditGolden,
    testing::Values(
        Golden{"vocabulary_70b",
               [](const Workshop& w) {
                 w.model("llama-3.1-70b",
                         {"--shape", "model.embed_tokens.weight=16064x8192", "--shape", "lm_head.weight=16064x8192"});
               },
               kConfig},
        Golden{"vocabulary_405b",  // only one of the two
               [](const Workshop& w) {
                 w.model("llama-3.1-405b", {"--shape", "model.embed_tokens.weight=16064x16384"});
               },
               kConfig},
        Golden{"vocabulary_exact",
               [](const Workshop& w) {
                 w.model("llama-3.1-8b", {"--shape", "model.embed_tokens.weight=32064x4096"});
               },
               kConfig},
        Golden{"vocabulary_several",
               [](const Workshop& w) {
                 w.model("gpt2", {"--dtype", "float32", "--shape", "wte.weight=25152x768"});
               },
               kConfig},
        Golden{"vocabulary_gpt2",
               [](const Workshop& w) {
                 w.model("gpt2", {"--dtype", "float32", "--shape", "wte.weight=12608x768"});
               },
               kConfig},
        Golden{"vocabulary_unexplained",
               [](const Workshop& w) {
                 w.model("llama-3.1-8b", {"--shape", "model.embed_tokens.weight=100003x4096"});
               },
               kConfig},
        Golden{"vocabulary_padded_70b",
               [](const Workshop& w) {
                 w.model("llama-3.1-70b", {"--shape", "model.embed_tokens.weight=128512x8192"});
               },
               kConfig},
        Golden{"vocabulary_padded_both",
               [](const Workshop& w) {
                 w.model("llama-2-7b", {"--dtype", "float16", "--shape", "model.embed_tokens.weight=32256x4096",
                                        "--shape", "lm_head.weight=32256x4096"});
               },
               kConfig},
        Golden{"vocabulary_padded_resized",
               [](const Workshop& w) {
                 w.model("llama-2-7b", {"--dtype", "float16", "--shape", "model.embed_tokens.weight=32003x4096"});
               },
               kConfig},
        Golden{"vocabulary_padded_zero",
               [](const Workshop& w) { w.save(padded(384)); },
               {"--config", "config.json", "--values", "--limit", "3"}},
        Golden{"vocabulary_padded_initialised",
               [](const Workshop& w) {
                 TensorValues values = padded(257);
                 TensorValue& embedding = value(values, "tok_embeddings.weight");
                 embedding.bytes.replace(257 * 128, 127 * 128, embedding.bytes.substr(0, 127 * 128));
                 w.save(values);
               },
               {"--config", "config.json", "--values", "--limit", "3"}}),
    title);

// Kind 3: shards, fused tensors, experts, norms.
INSTANTIATE_TEST_SUITE_P(
    Shapes, AuditGolden,
    testing::Values(Golden{"parts_of_tp4",
                           [](const Workshop& w) {
                             w.model(
                                 "llama-3.1-8b",
                                 {"--shape", "*.q_proj.weight=1024x4096", "--shape", "*.[kv]_proj.weight=256x4096",
                                  "--shape", "*.o_proj.weight=4096x1024", "--shape", "*.gate_proj.weight=3584x4096",
                                  "--shape", "*.up_proj.weight=3584x4096", "--shape", "*.down_proj.weight=4096x3584"});
                           },
                           kConfig},
                    Golden{"parts_one",
                           [](const Workshop& w) {
                             w.model("llama-3.1-8b", {"--shape", "model.layers.5.mlp.down_proj.weight=4096x7168"});
                           },
                           kConfig},
                    Golden{"parts_inconsistent",
                           [](const Workshop& w) {
                             w.model("llama-3.1-8b", {"--shape", "*.q_proj.weight=1024x4096", "--shape",
                                                      "*.gate_proj.weight=7168x4096"});
                           },
                           kConfig},
                    Golden{"norms_cut",
                           [](const Workshop& w) {
                             w.model("llama-3.1-70b", {"--shape", "*.input_layernorm.weight=1024"});
                           },
                           kConfig},
                    Golden{"wrong_dimension",
                           [](const Workshop& w) {
                             w.model("llama-3.1-8b", {"--shape", "*.o_proj.weight=1024x4096"});
                           },
                           kConfig},
                    Golden{"kv_heads_repeated",
                           [](const Workshop& w) {
                             w.model("llama-3.1-8b", {"--shape", "*.[kv]_proj.weight=2048x4096"});
                           },
                           kConfig},
                    Golden{"transposed",
                           [](const Workshop& w) {
                             w.model("gpt2", {"--dtype", "float32", "--shape", "h.*.mlp.c_fc.weight=3072x768"});
                           },
                           kConfig},
                    Golden{"other_config",
                           [](const Workshop& w) {
                             w.model("llama-3.1-8b", {"--shape", "*.gate_proj.weight=14000x4000"});
                           },
                           kConfig},
                    Golden{"experts_concatenated",
                           [](const Workshop& w) {
                             w.model("mixtral-8x7b-v0.1",
                                     {"--shape", "*.experts.*.w[13].weight=57344x4096", "--shape",
                                      "*.experts.*.w2.weight=16384x14336", "--without", "*.experts.{2..7}.*"});
                           },
                           kConfig},
                    Golden{"experts_missing",
                           [](const Workshop& w) {
                             w.model("mixtral-8x7b-v0.1", {"--without", "*.experts.{4..7}.*"});
                           },
                           kConfig},
                    Golden{"fused_plain",
                           [](const Workshop& w) {
                             w.write("config.json", R"({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2,
                   "n_positions": 32, "n_ctx": 32, "vocab_size": 128, "torch_dtype": "bfloat16"})");
                             w.must({"synth", "whole", "--config", "config.json", "--names", "hf", "-q"});
                             const std::string layout = llama_layout(
                                 R"([{"axis": "tp", "size": 4}])",
                                 tp_on(R"("*c_attn.weight", "*c_fc.weight")", 1) + "," +
                                     tp_on(R"("*c_attn.bias", "*c_fc.bias", "*c_proj.weight", "*wte.weight")", 0) +
                                     R"(, {"names": ["*"], "splits": []})");
                             w.write("layout.json", layout);
                             w.must({"convert", "whole", "ck", "--to", "dcp", "--layout", "layout.json", "-q"});
                           },
                           {"--config", "config.json", "--mesh", "tp=4"}}),
    title);

// Kinds 4 and 6: the layout that ran is not the declared one.
INSTANTIATE_TEST_SUITE_P(
    Layout, AuditGolden,
    testing::Values(
        Golden{"hsdp_was_fsdp", [](const Workshop& w) { w.copy("fsdp16"); }, {"--mesh", "dp_replicate=2,dp_shard=8"}},
        Golden{"hsdp_was_fsdp_405b",
               [](const Workshop& w) {
                 w.metadata("llama-3.1-405b", {"--mesh", "dp_shard=16,tp=8"});
               },
               {"--mesh", "dp_replicate=2,dp_shard=8,tp=8"}},
        Golden{
            "hsdp_is_hsdp", [](const Workshop& w) { w.copy("hsdp2x4"); }, {"--mesh", "dp_replicate=2,dp_shard=4"}, 0},
        Golden{"world_size_missing_degree", [](const Workshop& w) { w.copy("fsdp16"); }, {"--mesh", "dp_shard=8"}},
        Golden{"world_size_other", [](const Workshop& w) { w.copy("fsdp16"); }, {"--mesh", "dp_shard=3,tp=2"}},
        Golden{"not_sharded", [](const Workshop& w) { w.copy("tp8"); }, {"--mesh", "dp_shard=2,tp=8"}},
        Golden{"not_tensor_parallel", [](const Workshop& w) { w.copy("fsdp8"); }, {"--mesh", "dp_shard=8,tp=2"}},
        Golden{"gathered", [](const Workshop& w) { w.copy("single"); }, {"--mesh", "dp_shard=4,tp=2"}},
        Golden{"stage_missing", [](const Workshop& w) { w.copy("tp8"); }, {"--mesh", "pp=2,tp=8"}},
        Golden{"stage_not_copied",
               [](const Workshop& w) {
                 w.copy("pp2_tp4");
                 for (const char* rank : {"4", "5", "6", "7"})
                   fs::remove(w / ("ck/__" + std::string(rank) + "_0.distcp"));
               },
               {"--mesh", "pp=2,tp=4"}},
        Golden{"rank_silent",
               [](const Workshop& w) {
                 w.copy("tp8");
                 silence(w, "__3_0.distcp");
               },
               {"--mesh", "tp=8"}},
        Golden{"fsdp_before_tp",
               [](const Workshop& w) {
                 w.lay_out("fsdp4_tp2", llama_layout(kFsdp4Tp2, std::string(kNorms) + "," +
                                                                    tp_then_fsdp(R"("*wo.weight", "*w2.weight")", 1) +
                                                                    "," + fsdp_then_tp(R"("*")")));
               },
               {"--mesh", "dp_shard=4,tp=2"}},
        Golden{"ranks_in_other_order",
               [](const Workshop& w) {
                 w.lay_out("fsdp4_tp2",
                           llama_layout(R"([{"axis": "tp", "size": 2}, {"axis": "dp_shard", "size": 4}])",
                                        std::string(kNorms) + "," + tp_then_fsdp(R"("*wo.weight", "*w2.weight")", 1) +
                                            "," + tp_then_fsdp(R"("*")", 0)));
               },
               {"--mesh", "dp_shard=4,tp=2"}},
        Golden{"row_for_column",
               [](const Workshop& w) {
                 w.lay_out("tp8", llama_layout(kTp8, tp_on(R"("*wo.weight", "*w[qkv].weight")", 0) + "," +
                                                         tp_on(R"("*w2.weight", "*w1.weight")", 1) +
                                                         R"(, {"names": ["*norm.weight"], "splits": []},)" +
                                                         tp_on(R"("*")", 0)));
               },
               {"--mesh", "tp=8"}},
        Golden{"layout_file",
               [](const Workshop& w) { w.copy("fsdp4_tp2"); },
               {"--layout", "torchtitan-llama", "--mesh", "dp_shard=4,tp=2"},
               0},
        Golden{"no_trace_in_hf", [](const Workshop& w) { w.model("llama-3.1-8b"); }, {"--mesh", "dp_shard=4,tp=2"}, 0}),
    title);

// Kind 7: missing, additional and misnamed tensors and files.
INSTANTIATE_TEST_SUITE_P(
    Contents, AuditGolden,
    testing::Values(Golden{"healthy_8b", [](const Workshop& w) { w.model("llama-3.1-8b"); }, kConfig, 0},
                    Golden{"tied", [](const Workshop& w) { w.model("qwen2.5-0.5b"); }, kConfig, 0},
                    Golden{"tied_differs",
                           [](const Workshop& w) {
                             w.save(tp8());
                             std::string config = read_file(w / "config.json");
                             config.replace(config.find("\"tie_word_embeddings\": false"), 28,
                                            "\"tie_word_embeddings\": true ");
                             w.write("config.json", config);
                           },
                           {}},
                    Golden{"head_missing",
                           [](const Workshop& w) {
                             w.model("llama-3.1-8b", {"--without", "lm_head*"});
                           },
                           kConfig},
                    Golden{"head_of_a_reward_model",
                           [](const Workshop& w) {
                             TensorValues values = tp8();
                             values.erase("output.weight");
                             values["value_head.weight"] = {DType::kBFloat16, {1, 64}, std::string(128, 'v')};
                             w.save(values);
                           },
                           kConfig, 0},
                    Golden{"layers_missing",
                           [](const Workshop& w) {
                             w.model("llama-3.1-405b", {"--without", "model.layers.{63..125}.*"});
                           },
                           kConfig},
                    Golden{"tensors_missing",
                           [](const Workshop& w) {
                             w.model("qwen2-7b", {"--without", "model.layers.{3,7}.self_attn.q_proj.bias"});
                           },
                           kConfig},
                    Golden{"layers_extra",
                           [](const Workshop& w) {
                             w.model("llama-3.1-8b", {"--layers", "34"});
                           },
                           kConfig},
                    Golden{"dtype",
                           [](const Workshop& w) {
                             w.model("llama-3.1-8b", {"--dtype", "float16"});
                           },
                           kConfig},
                    Golden{"training_in_float32",
                           [](const Workshop& w) {
                             w.metadata("llama-3.1-8b", {"--dtype", "float32"});
                           },
                           kConfig, 0},
                    Golden{"model_in_float32",
                           [](const Workshop& w) {
                             w.model("llama-3.1-8b", {"--dtype", "float32"});
                           },
                           kConfig, 0},
                    Golden{"names_twice",
                           [](const Workshop& w) {
                             TensorValues values = tp8();
                             for (const char* name : {"layers.1.attention.wq.weight", "norm.weight"})
                               values["_orig_mod." + std::string(name)] = values.at(name);
                             value(values, "_orig_mod.norm.weight").shape = {32};
                             value(values, "_orig_mod.norm.weight").bytes.resize(64);
                             w.save(values);
                           },
                           kConfig},
                    Golden{"names_unknown",
                           [](const Workshop& w) {
                             TensorValues values = tp8();
                             values["layers.0.attention.gate.weight"] =
                                 values["vision.patch"] = {DType::kBFloat16, {2, 2}, std::string(8, 'v')};
                             w.save(values);
                           },
                           kConfig},
                    Golden{"optimizer_shape",
                           [](const Workshop& w) {
                             w.metadata(
                                 "llama-3.1-8b",
                                 {"--mesh", "dp_shard=8", "--optimizer", "--shape",
                                  "optimizer.state.model.embed_tokens.weight.exp_avg*=128512x4096", "--without",
                                  "optimizer.state.model.layers.31.*.exp_avg_sq", "--without", "lm_head.weight"});
                           },
                           kConfig},
                    Golden{"file_stale",
                           [](const Workshop& w) {
                             w.copy("tp8");
                             w.write("ck/__8_0.distcp", "of the save before, with 16 ranks");
                             w.write("ck/__9_0.distcp", "and another");
                           },
                           kConfig},
                    Golden{"file_missing",
                           [](const Workshop& w) {
                             w.copy("tp8");
                             fs::remove(w / "ck/__3_0.distcp");
                           },
                           {}},
                    Golden{"file_cut",
                           [](const Workshop& w) {
                             w.copy("tp8");
                             fs::resize_file(w / "ck/__3_0.distcp", 40'000);
                           },
                           {}},
                    Golden{"files_exchanged",
                           [](const Workshop& w) {
                             w.copy("tp8");
                             fs::rename(w / "ck/__0_0.distcp", w / "x");
                             fs::rename(w / "ck/__7_0.distcp", w / "ck/__0_0.distcp");
                             fs::rename(w / "x", w / "ck/__7_0.distcp");
                           },
                           {}},
                    Golden{"save_interrupted",
                           [](const Workshop& w) {
                             w.copy("tp8");
                             fs::rename(w / "ck/.metadata", w / "ck/.metadata.tmp");
                           },
                           {}},
                    Golden{"byte_flipped",
                           [](const Workshop& w) {
                             w.copy("tp8");
                             std::string bytes = read_file(w / "ck/__3_0.distcp");
                             const std::string weight = tp8().at("layers.0.feed_forward.w1.weight").bytes;
                             bytes[bytes.find(weight.substr(3 * 22 * 64 * 2, 64)) + 5] ^=
                                 0x10;  // rank 3 holds rows 66 to 87
                             write_file(w / "ck/__3_0.distcp", bytes);
                           },
                           {}},
                    Golden{"against_equal",
                           [](const Workshop& w) {
                             w.copy("tp8");
                             w.must({"convert", "ck", "other", "--to", "hf", "-q"});
                           },
                           {"--against", "other"},
                           0},
                    Golden{"against_differs",
                           [](const Workshop& w) {
                             w.copy("tp8");
                             TensorValues values = tp8();
                             value(values, "layers.2.feed_forward.w1.weight").bytes[100] ^= 1;
                             value(values, "layers.3.feed_forward.w1.weight").bytes[100] ^= 1;
                             values.erase("norm.weight");
                             write_dcp(values, w / "other", Mesh({{"dp_shard", 3}}));
                           },
                           {"--against", "other"}},
                    Golden{"replicas", [](const Workshop& w) { w.copy("hsdp2x4"); }, {"--replicas"}, 0}),
    title);

// Kind 8: values.
INSTANTIATE_TEST_SUITE_P(
    Values, AuditGolden,
    testing::Values(Golden{"values_healthy", [](const Workshop& w) { w.copy("tp8"); }, {"--values", "--limit", "4"}, 0},
                    Golden{"values_not_finite",
                           [](const Workshop& w) {
                             TensorValues values = tp8();
                             fill_rows(value(values, "layers.1.attention.wq.weight"), 17, 18, 0x7fc0);
                             fill_rows(value(values, "layers.3.feed_forward.w2.weight"), 5, 7, 0x7f80);
                             w.save(values);
                           },
                           {"--values", "--limit", "4"}},
                    Golden{"values_zero",
                           [](const Workshop& w) {
                             TensorValues values = tp8();
                             fill_rows(value(values, "layers.2.feed_forward.w3.weight"), 44, 66,
                                       0);  // the part of rank 2 of 8
                             fill_rows(value(values, "layers.0.attention.wv.weight"), 0, 64, 0);
                             fill_rows(value(values, "tok_embeddings.weight"), 250, 257, 0);
                             w.save(values);
                           },
                           {"--values", "--limit", "4"}},
                    Golden{"values_constant",
                           [](const Workshop& w) {
                             TensorValues values = tp8();
                             fill_rows(value(values, "layers.1.attention.wo.weight"), 0, 64, 0x3f80);
                             fill_rows(value(values, "layers.2.attention.wo.weight"), 8, 12, 0x3f80);
                             fill_rows(value(values, "layers.3.attention.wo.weight"), 1, 2, 0x47c3);  // 99,840
                             w.save(values);
                           },
                           {"--values", "--limit", "4"}}),
    title);

// ---- for programs

// Faults visible in names, shapes and files next to the model: a parameter under two names, adapters, placeholders,
// another model's tokenizer.
void add_adapters(TensorValues& values) {
  for (const char* layer : {"layers.0.", "layers.1."}) {
    values[layer + std::string("attention.wq.lora_A.default.weight")] = {
        DType::kFloat32, {4, 64}, std::string(1024, 'a')};
    values[layer + std::string("attention.wq.lora_B.default.weight")] = {
        DType::kFloat32, {64, 4}, std::string(1024, 'b')};
  }
}

INSTANTIATE_TEST_SUITE_P(
    LeftBehind, AuditGolden,
    testing::Values(Golden{"adapters_unmerged",
                           [](const Workshop& w) {
                             TensorValues values = tp8();
                             add_adapters(values);
                             w.save(values);
                           },
                           kConfig},
                    Golden{"adapters_alone",  // no weights to merge them into
                           [](const Workshop& w) {
                             TensorValues values;
                             add_adapters(values);
                             w.save(values);
                             fs::remove(w / "config.json");
                           },
                           {},
                           0},
                    Golden{"adapter_beside",
                           [](const Workshop& w) {
                             w.must({"convert", sample("tp8") + "/checkpoint", "ck", "--to", "hf", "-q"});
                             fs::remove(w / "ck/reshard_manifest.json");
                             fs::copy(w / "ck/model.safetensors", w / "ck/adapter_model.safetensors");
                           },
                           {},
                           0},
                    Golden{"placeholders",
                           [](const Workshop& w) {
                             TensorValues values = tp8();
                             for (auto& [name, tensor] : values)
                               if (name != "layers.0.attention_norm.weight") tensor = {tensor.dtype, {0}, ""};
                             w.save(values);
                           },
                           kConfig},
                    Golden{"placeholders_of_no_family",
                           [](const Workshop& w) {
                             w.save({{"blocks.0.proj.weight", {DType::kFloat32, {0}, ""}},
                                     {"blocks.0.norm.weight", {DType::kFloat32, {4}, std::string(16, 'n')}},
                                     {"state.history", {DType::kFloat32, {0}, ""}}});
                             fs::remove(w / "config.json");
                           },
                           {}},
                    Golden{"tokenizer_larger",
                           [](const Workshop& w) {
                             w.model("llama-3.1-8b");
                             w.write(
                                 "tokenizer.json",
                                 R"({"version": "1.0", "added_tokens": [{"id": 128255, "content": "<|last|>"}, )"
                                 R"({"id": 128256, "content": "<pad>"}, {"id": 128300, "content": "<|\n\"]}|>"}],)"
                                 R"("model": {"type": "BPE", "merges": [["\"", "}"]], "vocab": {"a": 0, "}": 1}}})");
                             w.write("added_tokens.json", R"({"<pad>": 128256, "<one>": 128257, "<two>": 128258})");
                           },
                           kConfig},
                    Golden{"tokenizer_fits",
                           [](const Workshop& w) {
                             w.model("llama-3.1-8b");
                             w.write("tokenizer.json",
                                     R"({"added_tokens": [{"id": 128255, "content": "<pad>"}],)"
                                     R"("model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["],", -1.5]]}})");
                           },
                           kConfig, 0},
                    Golden{"tokenizer_unigram_larger",
                           [](const Workshop& w) {
                             w.copy("tp8");
                             std::string vocab = R"(["w", -1])";
                             for (int i = 1; i < 258; ++i) vocab += R"(, ["w)" + std::to_string(i) + R"(", -1.5])";
                             w.write("tokenizer.json", R"({"model": {"vocab": [)" + vocab + "]}}");
                           },
                           kConfig},
                    Golden{"tokenizer_damaged",  // not the checkpoint's fault
                           [](const Workshop& w) {
                             w.model("llama-3.1-8b");
                             w.write("tokenizer.json", R"({"added_tokens": [{"id": )");
                             w.write("added_tokens.json", "{");
                           },
                           kConfig, 0},
                    Golden{"names_twice_without_config",
                           [](const Workshop& w) {
                             TensorValues values = tp8();
                             values["_orig_mod.norm.weight"] = values.at("norm.weight");
                             w.save(values);
                             fs::remove(w / "config.json");
                           },
                           {}},
                    Golden{"weights_twice",
                           [](const Workshop& w) {
                             TensorValues values = tp8();
                             values["copy.layers.1.attention.wq.weight"] = values.at("layers.1.attention.wq.weight");
                             for (const char* name : {"attention.wo.weight", "feed_forward.w1.weight"})
                               values["layers.1." + std::string(name)] = values.at("layers.0." + std::string(name));
                             w.save(values);
                           },
                           {"--config", "config.json", "--bytes"}},
                    Golden{"weights_twice_of_no_family",  // one name contains another; it is unknown which may be tied
                           [](const Workshop& w) {
                             const TensorValue a = tp8().at("layers.1.attention.wq.weight");
                             w.save({{"blocks.0.a", a}, {"old.blocks.0.a", a}, {"shared.weight", a}});
                             fs::remove(w / "config.json");
                           },
                           {}}),
    title);

}  // namespace
}  // namespace reshard::audit_golden_test
