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
#include "tests/support/checkpoints.h"
#include "tests/support/dcp_metadata.h"
#include "tests/support/golden.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

const std::string kConfigs = RESHARD_TEST_DATA "/configs/";
using Options = std::vector<std::string>;

// A directory in which commands run, so that they print short paths that are the same everywhere.
class Workshop {
 public:
  const std::string& path() const { return dir_.path(); }
  std::string operator/(const std::string& name) const { return dir_ / name; }
  std::string write(const std::string& name, std::string_view bytes) const { return dir_.write(name, bytes); }

  CommandResult run(const Options& options) const {
    Options args = {"/usr/bin/env", "-C", dir_.path(), RESHARD_BINARY};
    args.insert(args.end(), options.begin(), options.end());
    return run_command(args, 180);
  }
  void must(const Options& options) const {
    const CommandResult r = run(options);
    if (r.exit_code != 0) ADD_FAILURE() << r.out << r.err;
  }

  // Makes "ck", the files of a model without its data. "config.json" is the model's own config.
  void model(const std::string& config, Options options = {}) const {
    write("config.json", read_file(kConfigs + config + ".json"));
    options.insert(options.begin(), {"synth", "ck", "--config", "config.json", "--to", "hf", "--headers-only", "-q"});
    must(options);
  }
  // Makes "ck", the metadata of a training checkpoint without its data files.
  void metadata(const std::string& config, Options options) const {
    write("config.json", read_file(kConfigs + config + ".json"));
    options.insert(options.begin(), {"synth", "ck", "--config", "config.json", "--metadata-only", "-q"});
    must(options);
  }
  // Makes "ck" and "config.json", a copy of a sample.
  void copy(const std::string& name) const {
    copy_sample(name, path());
    fs::rename(*this / "checkpoint", *this / "ck");
  }
  // Writes "ck", tensors under torchtitan's names as `ranks` ranks of FSDP save them, next to the sample's config.
  void save(const TensorValues& values, Index ranks = 2) const {
    write("config.json", read_file(sample("tp8") + "/config.json"));
    write_dcp(values, *this / "ck", Mesh({{"dp_shard", ranks}}));
  }
  // Makes "ck", a sample that is resharded to this layout.
  void lay_out(const std::string& name, const std::string& layout) const {
    write("config.json", read_file(sample(name) + "/config.json"));
    write("layout.json", layout);
    must({"convert", sample(name) + "/checkpoint", "ck", "--to", "dcp", "--layout", "layout.json", "-q"});
    fs::remove(*this / "ck/reshard_manifest.json");
  }

 private:
  TempDir dir_;
};

TensorValues tp8() { return load_checkpoint(sample("tp8") + "/full.safetensors"); }

TensorValue& value(TensorValues& values, const std::string& name) { return values.at(name); }

// Fills some rows of a bfloat16 matrix with one value, given as its two bytes.
void fill_rows(TensorValue& tensor, Index begin, Index end, std::uint16_t bits) {
  const Index row = tensor.shape[1] * 2;
  for (Index at = begin * row; at < end * row; at += 2) std::memcpy(tensor.bytes.data() + at, &bits, 2);
}

// Returns a checkpoint with a vocabulary of 257 words and 384 rows (3 x 128), and `head` rows for the head.
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
constexpr const char* kNorms = R"({"names": ["*norm.weight"], "splits": [{"axes": ["dp_shard"], "dim": 0}]})";

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
        Golden{"no_trace_in_hf", [](const Workshop& w) { w.model("llama-3.1-8b"); }, {"--mesh", "dp_shard=4,tp=2"}}),
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
                           kConfig},
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
                           kConfig},
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
                           {}},
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

// GPT-2's published files contain the same mask in each layer.
TEST(Audit, MasksOfOldFilesAreNoCopiesOfOneAnother) {
  const TempDir dir;
  std::vector<float> mask(64), weight(64);
  for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = i % 8 <= i / 8 ? 1 : 0, weight[i] = static_cast<float>(i);
  TensorValues values;
  for (const std::string layer : {"h.0.", "h.1."}) {
    values[layer + "attn.bias"] =
        TensorValue{DType::kFloat32, {1, 1, 8, 8}, std::string(reinterpret_cast<const char*>(mask.data()), 256)};
    weight[0] += 1;
    values[layer + "attn.c_proj.weight"] =
        TensorValue{DType::kFloat32, {8, 8}, std::string(reinterpret_cast<const char*>(weight.data()), 256)};
  }
  write_dcp(values, dir / "ck", Mesh({{"dp_shard", 2}}));
  const CommandResult verified = reshard_cli({"verify", dir / "ck", "--family", "gpt2", "--bytes"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  values["h.1.attn.c_proj.weight"] = values["h.0.attn.c_proj.weight"];
  write_dcp(values, dir / "copied", Mesh({{"dp_shard", 2}}));
  EXPECT_THAT(reshard_cli({"verify", dir / "copied", "--family", "gpt2", "--bytes"}).out,
              HasSubstr("h.{0..1}.attn.c_proj.weight: hold the same values under 2 names"));
}

// FSDP2 with a shard_placement_fn cuts matrices on dimension 1. Norms, which tensor parallelism never cuts, show that
// it is FSDP.
TEST(Audit, FsdpOnALaterDimensionIsNoTensorParallelism) {
  const Workshop w;
  w.lay_out(
      "single", R"({"reshard_layout": 1, "name": "later", "files": "shards", "mesh": [{"axis": "dp_shard", "size": 4}],
    "tensors": [)" + std::string(kNorms) +
                    R"(, {"names": ["*"], "splits": [{"axes": ["dp_shard"], "dim": 1}]}]})");
  const CommandResult r = w.run({"inspect", "ck"});
  EXPECT_THAT(r.out, HasSubstr("dp_shard=4          certain: "));
  EXPECT_THAT(r.out, HasSubstr("wk, wo, wq, ... in 4 on a"));
  EXPECT_THAT(r.out, testing::Not(HasSubstr("tp=")));
}

// Ranks' parts of FSDP1's flat parameters begin and end at arbitrary positions.
TEST(Audit, FlatOptimizerStateIsNoFinding) {
  const std::string data = RESHARD_TEST_DATA "/fsdp/";
  for (const auto& [name, mesh] :
       {std::pair("fsdp1_sharded", "dp_shard=3"), std::pair("fsdp1_orig_params", "dp_shard=3"),
        std::pair("fsdp1_hybrid", "dp_replicate=2,dp_shard=2")}) {
    const CommandResult r = reshard_cli({"verify", data + name, "--mesh", mesh});
    EXPECT_THAT(r.out, HasSubstr(" of optimizer state are runs of elements, as FSDP1 cuts its flat parameters"))
        << name;
    EXPECT_THAT(r.out, testing::Not(HasSubstr("optimizer.state"))) << name;
  }
  // With another mesh everything is at other positions, the optimizer included.
  const CommandResult other = reshard_cli({"verify", data + "fsdp1_sharded", "--mesh", "dp_shard=2"});
  EXPECT_THAT(other.out, HasSubstr("this explains 3 other findings"));
}

TEST(Audit, AMessageOfSeveralLinesIsAFindingWithReasons) {
  const Workshop w;
  TensorValues values = tp8();
  values["_orig_mod.norm.weight"] = values.at("norm.weight");
  w.save(values);
  w.write("ck/reshard_manifest.json", R"({"family": "llama", "hf_rows": true, "tensors": {}})");
  const CommandResult r = w.run({"verify", "ck", "--bytes"});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_THAT(r.out, HasSubstr("is stored twice, under two names"));
  EXPECT_THAT(r.out, testing::Not(HasSubstr("x0a")));
}

TEST(Audit, LongSetsOfNumbersAreCutShort) {
  const Workshop w;
  TensorValues values;
  for (int i = 0; i < 500; i += 5) values["blocks." + std::to_string(i) + ".k.w"] = {DType::kFloat32, {0, 2}, ""};
  w.save(values);
  EXPECT_THAT(w.run({"inspect", "ck"}).out, HasSubstr("blocks.{0,5,10,...,495}.k.w  "));
}

TEST(Audit, JsonHoldsWhatTheTextShows) {
  const Workshop w;
  w.model("llama-3.1-70b", {"--shape", "model.embed_tokens.weight=16064x8192"});
  const CommandResult r = w.run({"verify", "ck", "--config", "config.json", "--json"});
  EXPECT_EQ(r.exit_code, 1) << r.err;
  const Json json = *parse_json(r.out, "out");
  EXPECT_EQ(*json.get_string("path"), "ck");
  EXPECT_EQ(*json.get_string("format"), "hf");
  EXPECT_EQ(*json.get_string("config"), "config.json");
  EXPECT_EQ(*json.get_string("family"), "llama");
  EXPECT_EQ(json.find("against"), nullptr);
  EXPECT_FALSE(*json.get_bool("ok"));
  EXPECT_THAT(std::string(*json.find("facts")->get_string("config")), HasSubstr("70,553,706,496 parameters"));
  EXPECT_NE(json.find("seconds"), nullptr);
  EXPECT_EQ(json.get_array("tensors")->size(), 0u);  // no data were read
  const auto findings = *json.get_array("findings");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(*findings[0].get_string("id"), "vocabulary-shard");
  EXPECT_EQ(*findings[0].get_string("severity"), "error");
  EXPECT_EQ(to_text(*findings[0].find("tensors")), "[\"model.embed_tokens.weight\"]");
  EXPECT_THAT(std::string(*findings[0].get_string("lost")), HasSubstr("112,192 rows"));
  std::map<std::string, Index> looked_at;
  const auto checks = *json.get_array("checks");
  for (const Json& check : checks) looked_at[std::string(*check.get_string("id"))] = *check.get_index("looked_at");
  EXPECT_EQ(looked_at.at("cover"), 723);
  EXPECT_EQ(looked_at.at("shape"), 723);
  EXPECT_EQ(looked_at.at("bytes"), 0);  // the check is skipped
}

TEST(Audit, JsonNamesWhatWasReadAndCompared) {
  const Workshop w;
  w.copy("tp8");
  const Json values = *parse_json(w.run({"verify", "ck", "--values", "--json"}).out, "out");
  EXPECT_TRUE(*values.get_bool("ok"));
  const auto tensors = *values.get_array("tensors");
  ASSERT_EQ(tensors.size(), 39u);
  for (const char* member : {"name", "dtype", "shape", "digest", "absmax", "nan", "inf", "zeros"})
    EXPECT_NE(tensors[0].find(member), nullptr) << member;
  w.must({"convert", "ck", "other", "--to", "hf", "-q"});
  const Json against = *parse_json(w.run({"verify", "ck", "--against", "other", "--json"}).out, "out");
  EXPECT_EQ(*against.get_string("against"), "other");
  const auto pairs = *against.get_array("tensors");
  ASSERT_EQ(pairs.size(), 39u);
  for (const char* member : {"against_dtype", "against_digest", "equal"})
    EXPECT_NE(pairs[0].find(member), nullptr) << member;
}

// Steps and moments have other orders of magnitude than weights.
TEST(Audit, ValuesOfATrainingStateShowWeightsFirstAndOtherKindsApart) {
  const Options verify = {"verify", sample("fsdp2_tp2_optim") + "/checkpoint", "--values", "--limit", "3"};
  const std::string out = reshard_cli(verify).out;
  const std::size_t weights = out.find("\nlargest values "),
                    others = out.find("\nlargest values of other state, by kind ");
  ASSERT_NE(weights, std::string::npos) << out;
  ASSERT_NE(others, std::string::npos) << out;
  EXPECT_EQ(out.substr(weights, others - weights).find("optimizer."), std::string::npos) << out;
  EXPECT_THAT(out.substr(weights, others - weights), HasSubstr("and 18 more"));
  for (const char* kind : {".exp_avg ", ".exp_avg_sq ", ".step "}) EXPECT_THAT(out.substr(others), HasSubstr(kind));
  const Json json = *parse_json(reshard_cli(verify, {"--json"}).out, "out");
  std::map<std::string, Index> kinds;
  const auto tensors = *json.get_array("tensors");
  for (const Json& t : tensors) ++kinds[std::string(*t.get_string("kind"))];
  EXPECT_EQ(kinds.at("weights"), 21);
  for (const char* kind : {"exp_avg", "exp_avg_sq", "step"}) EXPECT_EQ(kinds.at(kind), 21) << kind;
}

TEST(Audit, JunitHasACaseForEachCheck) {
  const Workshop w;
  w.copy("fsdp16");
  EXPECT_EQ(w.run({"verify", "ck", "--mesh", "dp_replicate=2,dp_shard=8", "--junit", "bad.xml"}).exit_code, 1);
  expect_golden("audit_junit_bad.xml", without_times(read_file(w / "bad.xml")));
  EXPECT_EQ(w.run({"verify", "ck", "--mesh", "dp_shard=16", "--junit", "good.xml"}).exit_code, 0);
  expect_golden("audit_junit_good.xml", without_times(read_file(w / "good.xml")));
}

TEST(Audit, FailOnDecidesTheExitCode) {
  const Workshop w;
  w.model("llama-3.1-8b", {"--dtype", "float16"});  // a warning
  const auto code = [&](const std::string& fail_on) {
    return w.run({"verify", "ck", "--config", "config.json", "--fail-on", fail_on}).exit_code;
  };
  EXPECT_EQ(code("note"), 1);
  EXPECT_EQ(code("warning"), 1);
  EXPECT_EQ(code("error"), 0);
  EXPECT_EQ(code("anything"), 2);
}

TEST(Audit, WhatMakesNoSenseIsSaid) {
  const Workshop w;
  w.copy("tp8");
  const auto expect = [&](Options options, int code, const std::string& message) {
    options.insert(options.begin(), "verify");
    const CommandResult r = w.run(options);
    EXPECT_EQ(r.exit_code, code) << r.out;
    EXPECT_EQ(r.out, "");
    EXPECT_THAT(r.err, HasSubstr(message));
  };
  expect({"absent"}, 5, "absent: not found");
  expect({"ck", "--config", "absent.json"}, 5, "absent.json");
  expect({"ck", "--config", kConfigs + "gpt2.json"}, 4, "no tensor has the name of a parameter of the model");
  expect({"ck", "--mesh", "xp=2"}, 2, "xp");
  expect({"ck", "--layout", "torchtitan-llama"}, 2, "has no mesh; add --mesh");
  expect({"ck", "--layout", "nowhere.json"}, 5, "no such file or built-in layout");
  expect({"ck", "--against", "absent"}, 5, "absent: not found");
  w.must({"convert", "ck", "model", "--to", "hf", "--max-shard-size", "200kB", "-q"});
  fs::remove(w / "model/model-00002-of-00003.safetensors");  // this also removes the shapes that would show the fault
  expect({"model"}, 5, "model/model-00002-of-00003.safetensors: file is missing; it holds");
  fs::remove(w / "ck/.metadata");
  expect({"ck"}, 3, ".metadata is missing");
}

TEST(Audit, AMeshThatWroteASampleIsConfirmed) {
  for (const auto& [name, mesh] :
       {std::pair("tp8", "tp=8"), std::pair("fsdp8", "dp_shard=8"), std::pair("fsdp16", "dp_shard=16"),
        std::pair("hsdp2x4", "dp_replicate=2,dp_shard=4"), std::pair("fsdp4_tp2", "dp_shard=4,tp=2"),
        std::pair("fsdp2_tp2_optim", "dp_shard=2,tp=2"), std::pair("pp2_tp4", "pp=2,tp=4"),
        std::pair("single", "dp_shard=1")}) {
    const CommandResult r = run_command({RESHARD_BINARY, "verify", sample(name) + "/checkpoint", "--mesh", mesh});
    EXPECT_EQ(r.exit_code, 0) << name << "\n" << r.out << r.err;
  }
}

TEST(Audit, ModelsAreCleanAsTheyAreMade) {
  for (const char* config : {"mistral-7b-v0.1", "mixtral-8x7b-v0.1", "qwen3-8b", "gemma-3-1b", "gemma-2-9b"}) {
    const Workshop w;
    const Json file = *parse_json(read_file(kConfigs + config + ".json"), config);
    w.model(config, {"--dtype", std::string(*file.get_string("torch_dtype"))});
    const CommandResult r = w.run({"verify", "ck", "--config", "config.json"});
    EXPECT_EQ(r.exit_code, 0) << config << "\n" << r.out << r.err;
  }
}

// ---- Samples and documents

TEST(Audit, SamplesShowWhatTheyPromise) {
  Index scripts = 0;
  for (const auto& entry : fs::directory_iterator(RESHARD_SOURCE_DIR "/samples/audit")) {
    const std::string name = entry.path().filename().string();
    if (entry.path().extension() != ".sh" || name == "lib.sh") continue;
    ++scripts;
    const CommandResult r = run_command({entry.path().string()}, 60, {"RESHARD=" RESHARD_BINARY});
    EXPECT_EQ(r.exit_code, 0) << name << "\n" << r.out << r.err;
    EXPECT_THAT(read_file(RESHARD_SOURCE_DIR "/samples/audit/README.md"), HasSubstr("`" + name + "`"));
  }
  EXPECT_GE(scripts, 6);
}

// Ids of findings are string literals next to a severity or an `id`; all such literals with a hyphen are ids.
std::set<std::string> finding_ids() {
  const std::string root = RESHARD_SOURCE_DIR "/";
  std::vector<std::string> files = {root + "tools/verify.cc"};
  for (const char* room : {"lib/audit", "lib/forecast"})
    for (const auto& entry : fs::directory_iterator(root + room))
      if (entry.path().extension() == ".cc") files.push_back(entry.path().string());
  std::set<std::string> ids;
  const std::regex compound(R"re("([a-z]+(-[a-z]+)+)")re"), beside(R"re(Severity::k\w+, "([a-z]+)")re");
  for (const std::string& file : files) {
    const std::string text = read_file(file);
    for (const std::regex& pattern : {compound, beside})
      for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it) ids.insert((*it)[1]);
  }
  return ids;
}

TEST(Audit, EveryFindingIsInTheCatalogue) {
  const std::string page = read_file(RESHARD_SOURCE_DIR "/docs/audit.md");
  const std::set<std::string> ids = finding_ids();
  EXPECT_GE(ids.size(), 60u);
  for (const std::string& id : ids) EXPECT_THAT(page, HasSubstr("`" + id + "`"));
}

TEST(Audit, TheCatalogueShowsWhatIsPrinted) {
  std::set<std::string> printed;
  for (const auto& [name, text] : all_files(RESHARD_SOURCE_DIR "/tests/cli/golden")) printed.insert(text);
  const std::string page = without_times(read_file(RESHARD_SOURCE_DIR "/docs/audit.md")), fence = "\n```\n";
  Index shown = 0;
  for (std::size_t at = 0; (at = page.find(fence, at)) != std::string::npos; ++at) {
    const std::size_t begin = at + fence.size(), end = page.find(fence, begin);
    const std::string block = page.substr(begin, end - begin) + "\n";
    if (!block.starts_with("verify    ") && !block.starts_with("check     ")) continue;
    EXPECT_EQ(printed.count(block), 1u) << block;
    ++shown;
  }
  EXPECT_GE(shown, 5);
}

// Compressed items are decoded into TMPDIR. If that fails, the checkpoint is not reported as damaged.
TEST(Audit, WhatCannotBeDecodedForWantOfAPlaceIsNotCalledDamaged) {
  const TempDir dir;
  const CommandResult r = run_command({RESHARD_BINARY, "verify", RESHARD_TEST_DATA "/runs/zstd/checkpoint"}, 60,
                                      {"TMPDIR=" + (dir / "none")});
  EXPECT_EQ(r.exit_code, 1) << r.err;
  EXPECT_THAT(r.out, HasSubstr("cannot be checked"));
  EXPECT_THAT(r.out, HasSubstr("the data itself may be fine"));
  EXPECT_THAT(r.out, testing::Not(HasSubstr("damaged")));
}

// Bytes around tensors are not reported if there are no tensors.
TEST(Audit, AFileWithoutTensorsHasNoBytesThatBelongToNone) {
  const TempDir dir;
  dir.write("ck/model.safetensors", std::string("\x08\0\0\0\0\0\0\0{}      ", 16));
  const CommandResult r = reshard_cli({"verify", dir / "ck"});
  EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
  const CommandResult converted = reshard_cli({"convert", dir / "ck", dir / "out", "--to", "hf"});
  EXPECT_EQ(converted.exit_code, 2);
  EXPECT_THAT(converted.err, HasSubstr("model.safetensors: contains no tensors"));
}

}  // namespace
}  // namespace reshard
