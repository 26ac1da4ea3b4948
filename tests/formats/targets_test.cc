// What holds of every target: of each format that can be written, the toy included, and of the ways to write it, with a
// mesh, a container or a codec. Sources are samples, small models of families, and tensors of no model. A new row of
// the table of formats is included by itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <numeric>
#include <random>
#include <tuple>

#include "formats/encoding/torch_archive.h"
#include "formats/hf/hf.h"
#include "formats/open.h"
#include "formats/registry.h"
#include "lib/audit/verification.h"
#include "tests/formats/toy/toy.h"
#include "tests/support/checkpoints.h"
#include "tests/support/expect_run.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::targets_test {
namespace {

namespace fs = std::filesystem;
using testing::AnyOfArray;
using testing::ElementsAre;
using testing::HasSubstr;
using Words = std::vector<std::string>;

// ---- the table

// A way to write a format: `options` besides --to and --names, none if it is the plain way.
struct Way {
  const Format* format;
  std::string title;
  Words options;
};

void PrintTo(const Way& way, std::ostream* out) { *out << way.title; }

std::vector<Words> options_of(const Format& format) {
  std::vector<Words> out = {{}};
  std::vector<std::string> meshes;
  if (format.sharding == Sharding::kOwnLocal)
    meshes = {"tp=4"};
  else if (format.sharding == Sharding::kStages)
    meshes = {"pp=2", "pp=4"};
  else if (format.takes_mesh())
    meshes = {"pp=2", "tp=3", "dp_replicate=2,dp_shard=2,tp=2"};
  for (const std::string& mesh : meshes) out.push_back({"--mesh", mesh});
  if (format.takes_container) out.push_back({"--shard-format", "bin"});
  if (format.takes_compression) out.push_back({"--codec", "zstd:1"});
  if (format.max_file_bytes > 0) out.push_back({"--max-shard-size", "100kB"});
  return out;
}

std::vector<Way> ways() {
  std::vector<const Format*> rows(formats().begin(), formats().end());
  rows.push_back(&kToyFormat);
  std::vector<Way> out;
  for (const Format* format : rows) {
    if (!format->lay_out) continue;
    for (const Words& options : options_of(*format)) {
      Way way{format, std::string(format->name), options};
      for (const std::string& word : options)
        if (!word.starts_with("--")) way.title += "_" + word;
      std::replace_if(
          way.title.begin(), way.title.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
      out.push_back(std::move(way));
    }
  }
  return out;
}

template <typename Wanted>
std::vector<Way> ways_if(const Wanted& wanted) {
  std::vector<Way> out = ways();
  std::erase_if(out, [&](const Way& way) { return !wanted(way); });
  return out;
}

std::string title(const testing::TestParamInfo<Way>& info) { return info.param.title; }

// Small models of the families whose tensors are fused, stacked, tied, biased or quantised.
const std::pair<const char*, const char*> kModels[] = {
    {"gpt2", R"({"model_type": "gpt2", "vocab_size": 50, "n_positions": 16, "n_embd": 8, "n_head": 2, "n_layer": 2})"},
    {"bloom", R"({"model_type": "bloom", "vocab_size": 64, "hidden_size": 16, "n_head": 4, "n_layer": 2})"},
    {"tied_qwen2", R"({"model_type": "qwen2", "vocab_size": 100, "hidden_size": 16, "intermediate_size": 32,
      "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true})"},
    {"qwen3_moe", R"({"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
      "moe_intermediate_size": 8, "num_experts": 4, "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 4})"},
    {"mixtral", R"({"model_type": "mixtral", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
      "num_local_experts": 4, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})"},
    {"gemma2", R"({"model_type": "gemma2", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
      "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4})"}};

struct Source {
  std::string name, path, config;
};

// What formats cannot hold of these models and meshes.
const std::vector<testing::Matcher<std::string>> kRefusals = {
    HasSubstr(": expected a mesh of "),
    HasSubstr(" names are supported"),
    HasSubstr("has no Megatron core names"),
    HasSubstr("its Megatron args are unknown"),
    HasSubstr("an optimizer with masters needs weights in"),
    HasSubstr("is not a parameter of the models whose layout in vLLM is supported"),
    HasSubstr("DTensor has no such placement"),
    HasSubstr("torch's loader would put some of its")};

// Runs the program that has the toy too.
CommandResult run(Words words, const Words& more = {}) {
  words.insert(words.begin(), RESHARD_TOY_BINARY);
  words.insert(words.end(), more.begin(), more.end());
  return run_command(words);
}

class Targets : public testing::TestWithParam<Way> {
 protected:
  Targets() {
    for (const char* name : {"tp8", "pp2_tp4", "fsdp2_tp2_optim", "hsdp2x4"})
      sources_.push_back({name, sample(name) + "/checkpoint", sample(name) + "/config.json"});
    sources_.push_back(
        {"colossalai", sample("colossalai") + "/healthy_st/epoch-0_step-7", sample("colossalai") + "/config.json"});
  }

  static const Format& format() { return *GetParam().format; }

  // Writes a checkpoint in a way, which holds its tensors under these names or the only ones it can, and verifies it.
  static void convert(const std::string& from, const std::string& to, const Way& way, const std::string& names = "hf") {
    Words words = {"convert", from, to, "--quiet", "--memory", "1GiB", "--to", std::string(way.format->name)};
    words.insert(words.end(), way.options.begin(), way.options.end());
    const std::string_view own = way.format->own_names;
    ASSERT_NO_FATAL_FAILURE(expect_success(run(words, {"--names", own.empty() ? names : std::string(own)})));
    if (way.format == &kToyFormat) {  // which only the program knows
      expect_success(run({"verify", to, "--replicas", "--memory", "1GiB"}));
    } else if (way.format->open) {
      EXPECT_THAT(found(all_of(to)), ElementsAre());
    }
  }
  static void expect_equal(const std::string& a, const std::string& b) {
    expect_success(run({"diff", a, b, "--memory", "1GiB"}));
  }

  // Makes one of kModels.
  Source make(const std::string& name, const char* config) {
    const std::string directory = dir_ / (name + ".source"), path = directory + ".json";
    if (!fs::exists(path)) {
      write_file(path, config);
      expect_success(reshard_cli({"synth", directory, "--config", path, "--to", "hf", "-q"}));
    }
    return {name, directory, path};
  }

  // Converts the source to this format. Returns nothing if the target refuses the model or mesh for one of kRefusals.
  std::string convert_if_possible(const Source& source, const std::string& mesh, const std::string& names = "") {
    const std::string path = dir_ / (source.name + "." + std::to_string(count_++));
    Words words = {"convert", source.path, path, "--to", std::string(format().name), "-q", "--config", source.config};
    if (!mesh.empty()) words.insert(words.end(), {"--mesh", mesh});
    if (!names.empty()) words.insert(words.end(), {"--names", names});
    const CommandResult r = run(words);
    if (r.exit_code == 0) return path;
    EXPECT_EQ(r.exit_code, 4) << testing::PrintToString(words) << r.err;
    EXPECT_THAT(r.err, AnyOfArray(kRefusals)) << testing::PrintToString(words);
    return "";
  }

  static VerifyOptions all_of(const std::string& path) {
    VerifyOptions options;
    options.path = path;
    options.bytes = options.replicas = true;
    options.run.memory = Index{2} << 30;
    options.run.threads = 2;
    return options;
  }

  // Returns the ids of the findings, or an error's message.
  static std::vector<std::string> found(const VerifyOptions& options) {
    const auto report = verify(open_checkpoint, options);
    if (!report) return {report.error().message()};
    EXPECT_GT(report->tensor_count, 0);
    std::vector<std::string> out;
    for (const Finding& f : report->findings)
      out.push_back(f.id + ": " + (f.tensors.empty() ? "" : f.tensors[0] + " ") + f.what);
    return out;
  }

  TempDir dir_;
  int count_ = 0;
  std::vector<Source> sources_;
};

// ---- of every way to write

class EveryWay : public Targets {};
INSTANTIATE_TEST_SUITE_P(Targets, EveryWay,
                         testing::ValuesIn(sampled(ways_if([](const Way& w) { return w.format->open; }), 3)), title);

// Under each of the names that the format can hold.
TEST_P(EveryWay, ThereAndBackIsTheSameModel) {
  const Way& way = GetParam();
  const std::string model = sample("tp8") + "/hf.safetensors";
  const TensorValues expected = load_checkpoint(model);
  for (const std::string names : {"hf", "torchtitan"}) {
    if (names != "hf" && (way.format->hf_names || !way.format->own_names.empty() || every_nth(2) > 1)) continue;
    const std::string there = dir_ / ("there-" + names), back = dir_ / ("back-" + names);
    ASSERT_NO_FATAL_FAILURE(convert(model, there, way, names));
    if (names == "hf") expect_equal(model, there);
    ASSERT_NO_FATAL_FAILURE(convert(there, back, {&kHfFormat, "hf", {}}));
    EXPECT_TRUE(load_checkpoint(back) == expected) << names;
  }
}

// ---- of every format

class EveryFormat : public Targets {};
INSTANTIATE_TEST_SUITE_P(Targets, EveryFormat, testing::ValuesIn(ways_if([](const Way& w) {
                           return w.options.empty() && w.format != &kToyFormat;
                         })),
                         title);

TEST_P(EveryFormat, BecomesEveryOtherAndComesBack) {
  const Way& a = GetParam();
  if (!format().open) GTEST_SKIP() << "is read as another";
  const std::string first = dir_ / "first";
  ASSERT_NO_FATAL_FAILURE(convert(sample("tp8") + "/hf.safetensors", first, a));
  for (const Way& b : sampled(ways_if([](const Way& w) { return w.options.empty() && w.format->open; }), 6)) {
    SCOPED_TRACE(b.title);
    const std::string middle = dir_ / "middle", back = dir_ / "back";
    ASSERT_NO_FATAL_FAILURE(convert(first, middle, b));
    ASSERT_NO_FATAL_FAILURE(convert(middle, back, a));
    expect_equal(first, back);
    fs::remove_all(middle);
    fs::remove_all(back);
  }
}

TEST_P(EveryFormat, VerifiesClean) {
  std::vector<std::string> meshes = {""};
  if (format().takes_mesh()) meshes = {"tp=2", "pp=2", "dp_shard=3,tp=2", "dp_replicate=2,dp_shard=2"};
  const int models = static_cast<int>(std::size(kModels)), samples = static_cast<int>(sources_.size());
  const int step = every_nth(8);  // a different mesh each time
  int made = 0, n = static_cast<int>(format().name.size());
  for (int i = 0; i < samples + models; ++i)
    for (const std::string& mesh : meshes) {
      if (made > 0 && n++ % step != 0) continue;
      const Source source = i < samples ? sources_[static_cast<std::size_t>(i)]
                                        : make(kModels[i - samples].first, kModels[i - samples].second);
      const std::string path = convert_if_possible(source, mesh);
      if (path.empty()) continue;
      ++made;
      VerifyOptions options = all_of(path);
      EXPECT_THAT(found(options), ElementsAre()) << source.name << " " << mesh;
      options.config = source.config;
      EXPECT_THAT(found(options), ElementsAre()) << source.name << " " << mesh << " --config";
    }
  EXPECT_GT(made, 0);
}

TEST_P(EveryFormat, VerifiesCleanUnderEveryName) {
  for (const Source& source : {sources_[0], sources_[2]})
    for (const char* names : sampled({"hf", "torchtitan", "torchtitan-2026", "megatron"}, 4)) {
      const std::string path = convert_if_possible(source, "", names);
      if (path.empty()) continue;
      VerifyOptions options = all_of(path);
      options.config = source.config;
      EXPECT_THAT(found(options), ElementsAre()) << source.name << " " << names;
    }
}

// And say so. What they hold of the model is the same.
TEST_P(EveryFormat, ModelsAloneLeaveTheOptimizerOut) {
  if (format().holds != StateSupport::kModel) GTEST_SKIP() << "holds more than a model";
  const std::string source = sample("fsdp2_tp2_optim") + "/checkpoint", out = dir_ / "out";
  const CommandResult r = reshard_cli({"convert", source, out, "--to", std::string(format().name)});
  expect_success(r);
  EXPECT_THAT(r.out, HasSubstr("left out: optimizer ("));
  EXPECT_TRUE(fs::exists(out + "/config.json"));
  EXPECT_TRUE(load_checkpoint(out) == load_checkpoint(sample("fsdp2_tp2_optim") + "/hf.safetensors"));
}

TEST_P(EveryFormat, RefusesOptionsThatMeanNothingForIt) {
  for (const auto& [option, value, means] : {std::tuple("--shard-format", "bin", format().takes_container),
                                             {"--max-shard-size", "1MB", format().max_file_bytes > 0},
                                             {"--codec", "zstd:1", format().takes_compression},
                                             {"--mesh", "dp_shard=1", format().takes_mesh()}}) {
    const CommandResult r = reshard_cli({"plan", sample("tp8") + "/checkpoint", "--to", std::string(format().name),
                                         "--memory", "1GiB", std::string(option), value});
    EXPECT_EQ(r.exit_code, means ? 0 : 2) << option << ": " << r.err;
    if (!means) {
      EXPECT_THAT(r.err, HasSubstr(std::string(option) + " does not apply to --to "));
    }
  }
}

// The output of a part of a model can be opened; otherwise the target's error says that it needs whole models.
TEST_P(EveryFormat, OfAPartOfAModelIsOpenedAgainOrRefused) {
  const std::vector<std::vector<std::string>> selections = {
      {"--include", "*embed*"}, {"--include", "*layers.1.*"}, {"--include", "*wq*"}, {"--exclude", "*norm*"}};
  for (std::size_t i = 0; i < selections.size(); ++i) {
    const std::string path = dir_ / ("part" + std::to_string(i));
    std::vector<std::string> args = {"convert", sources_[0].path, path, "--to", std::string(format().name), "-q"};
    args.insert(args.end(), selections[i].begin(), selections[i].end());
    const CommandResult written = reshard_cli(args);
    if (written.exit_code != 0) {
      EXPECT_EQ(written.exit_code, 4) << i << ": " << written.err;
      EXPECT_FALSE(std::filesystem::exists(path));
      continue;
    }
    const CommandResult again = reshard_cli({"convert", path, path + ".dcp", "--to", "dcp", "-q", "--family", "none"});
    EXPECT_EQ(again.exit_code, 0) << i << ": " << again.err;
  }
}

// Damage is found by the format's own checksums or by the manifest.
TEST_P(EveryFormat, DamageIsSeenByWhoConvertsItFurther) {
  for (const Source& source : {sources_[0], sources_[2]}) {
    const std::string path = convert_if_possible(source, "");
    if (path.empty()) continue;
    std::vector<std::pair<std::string, Index>> places;  // inside a tensor: file, offset
    {
      auto open = open_checkpoint(path);
      ASSERT_TRUE(open.has_value());
      const Catalog& catalog = open->reader->catalog();
      std::vector<std::size_t> all(catalog.tensors().size());
      std::iota(all.begin(), all.end(), std::size_t{0});
      ASSERT_TRUE(open->reader->locate(all, 1, "").has_value());
      for (std::size_t i = 0; i < all.size(); i += 11 * static_cast<std::size_t>(every_nth(4))) {
        const Fragment f = catalog.tensors()[i].fragments.get(0);
        places.emplace_back(catalog.file_path(f.extent.file), f.extent.offset + f.start + f.extent.length / 2);
      }
    }
    for (const auto& [file, offset] : places) {
      const std::string whole = read_file(file);
      std::string damaged = whole;
      damaged[static_cast<std::size_t>(offset)] ^= 0x10;
      write_file(file, damaged);
      const std::string out = dir_ / "further";
      for (const char* names : {"hf", "torchtitan"}) {  // the second has rows in another order
        const CommandResult r =
            reshard_cli({"convert", path, out, "--to", "dcp", "--names", names, "--config", source.config, "-q"});
        EXPECT_EQ(r.exit_code, 3) << file << "@" << offset << " " << names << r.err;
        EXPECT_FALSE(std::filesystem::exists(out));
        std::filesystem::remove_all(out);
      }
      write_file(file, whole);
    }
    const CommandResult sound =
        reshard_cli({"convert", path, dir_ / (source.name + ".sound"), "--to", "dcp", "--config", source.config});
    EXPECT_EQ(sound.exit_code, 0) << sound.err;
    EXPECT_THAT(sound.out, testing::AnyOf(testing::HasSubstr("source CRCs match"),
                                          testing::HasSubstr("of the source's manifest verified")));
  }
}

TEST_P(EveryFormat, OfWholeTensorsSaysThatAMeshLeavesNoTrace) {
  if (!format().holds_whole_tensors()) GTEST_SKIP() << format().name << " follows the ranks";
  VerifyOptions options = all_of(convert_if_possible(sources_[0], ""));
  options.mesh = *Mesh::parse("tp=8");
  const std::string read_as(open_checkpoint(options.path)->format->title);
  EXPECT_THAT(found(options), ElementsAre("layout-gathered-format: " + read_as +
                                          " files contain whole tensors, so they do not depend on the mesh"));
}

// ---- of tensors of no model, by the library

TensorValues bare_tensors() {
  TensorValues out;
  std::mt19937 random(1);
  const auto add = [&](const std::string& name, DType dtype, const Dims& shape) {
    TensorValue value{dtype, shape, std::string(static_cast<std::size_t>(volume(shape) * byte_size(dtype)), '\0')};
    for (char& c : value.bytes) c = static_cast<char>(dtype == DType::kBool ? random() % 2 : random());
    out.emplace(name, std::move(value));
  };
  add("model.embed_tokens.weight", DType::kBFloat16, {8, 6});
  add("model.layers.0.self_attn.q_proj.weight", DType::kFloat32, {6, 4});
  add("model.layers.1.self_attn.q_proj.weight", DType::kFloat16, {7, 4});  // not cut evenly
  add("model.layers.1.mask", DType::kBool, {3});
  add("model.layers.1.scales", DType::kFloat8E4M3, {2, 2, 2});
  add("model.layers.1.empty", DType::kFloat32, {0, 3});
  add("model.norm.count", DType::kInt64, {});
  add("names are \"any\" / text\xc3\xa9", DType::kFloat64, {5});
  return out;
}

// Returns a request for the model, for two ranks if the format has a file per rank.
LayoutRequest request_for(const Format& format, const TensorValues& values) {
  LayoutRequest request;
  if (format.takes_mesh()) request.mesh = Mesh({{format.sharding == Sharding::kStages ? "pp" : "tp", 2}});
  for (const auto& [name, value] : values) {
    TargetTensor t{name, value.dtype, value.shape, {name}, {}};
    if (format.sharding == Sharding::kStages)
      t.placement = Placement{{}, static_cast<Index>(request.tensors.size() % 2)};
    else if (format.takes_mesh() && value.shape.rank() > 0)
      t.placement = Placement{{{{"tp"}, 0}}};
    request.tensors.push_back(std::move(t));
  }
  if (format.holds == StateSupport::kEverything)
    request.blobs.push_back({"step", {"step"}, torch_archive::object_item(std::string_view("\x80\x02N.", 4))});
  return request;
}

// Formats that hold any tensors. One that cuts by rules of its own (vLLM) or has names of its own (Megatron) knows a
// few models.
class BareTensors : public Targets {
 protected:
  void write(const std::string& path) {
    auto target = format().lay_out(request_for(format(), values_));
    ASSERT_TRUE(target) << target.error().message();
    EXPECT_EQ((*target)->single_file() != nullptr, format().is_file);
    write_target(values_, **target, path);
  }
  // Returns the error of reading a path, or the values.
  Result<TensorValues> read(const std::string& path) {
    const auto reader = TRY(open_with(format(), path));
    return load_values(*reader);
  }
  // Returns the files of a checkpoint: those below a directory, or the single file.
  static std::vector<std::string> files_of(const std::string& path) {
    if (!*is_directory(path)) return {path};
    std::vector<std::string> out;
    for (const auto& [name, bytes] : all_files(path)) out.push_back(path_join(path, name));
    return out;
  }
  // Returns the bytes of each file that belong to no tensor.
  std::vector<Index> places_outside_tensors(const std::string& path, const std::string& file, Index size) {
    std::vector<bool> taken(static_cast<std::size_t>(size), false);
    const auto reader = open_with(format(), path);
    EXPECT_TRUE(reader && load_values(**reader));  // this locates them
    const Catalog& catalog = (*reader)->catalog();
    for (const Tensor& t : catalog.tensors())
      for (const FragmentList* list : {&t.fragments, &t.replicas})
        for (std::size_t i = 0; i < list->size(); ++i) {
          const Extent& e = list->extent(i);
          if (catalog.file_path(e.file) == file) std::fill_n(taken.begin() + e.offset, e.length, true);
        }
    std::vector<Index> out;
    for (Index i = 0; i < size; ++i)
      if (!taken[static_cast<std::size_t>(i)]) out.push_back(i);
    return out;
  }

  const TensorValues values_ = bare_tensors();
  std::mt19937 random_{7};
};

TEST_P(BareTensors, ReadsWhatItWrites) {
  const std::string path = dir_ / "a";
  ASSERT_NO_FATAL_FAILURE(write(path));
  EXPECT_TRUE(recognises(format(), path));
  EXPECT_EQ(*is_directory(path), !format().is_file);
  EXPECT_EQ(*recognised_format(*PathSnapshot::look(path)), &format() == &kToyFormat ? nullptr : &format())
      << "a row before it takes it";
  const auto reader = open_with(format(), path);
  ASSERT_TRUE(reader) << reader.error().message();
  const auto values = load_values(**reader);
  ASSERT_TRUE(values) << values.error().message();
  EXPECT_EQ(*values, values_);
  EXPECT_EQ((*reader)->catalog().stale_files, std::vector<std::string>());
  EXPECT_EQ((*reader)->catalog().warnings, std::vector<std::string>());
  for (const Tensor& t : (*reader)->catalog().tensors()) {
    if (format().holds_whole_tensors()) {
      EXPECT_LE(t.fragments.size(), 1U) << t.name;
    }
  }
  if (format().holds == StateSupport::kEverything) {
    ASSERT_EQ((*reader)->catalog().blobs.size(), 1U);
    const Blob& blob = (*reader)->catalog().blobs[0];
    EXPECT_EQ(blob.name, "step");
    EXPECT_EQ((*reader)->describe(blob), "None");
    EXPECT_EQ(*(*reader)->blob_bytes(blob), torch_archive::object_item(std::string_view("\x80\x02N.", 4)));
  }
  // The same follows from metadata alone.
  const auto without = open_with(format(), path, {.files_too = false});
  ASSERT_TRUE(without) << without.error().message();
  EXPECT_EQ((*without)->catalog().tensors().size(), values_.size());
}

TEST_P(BareTensors, WritesTheSameBytesAgain) {
  ASSERT_NO_FATAL_FAILURE(write(dir_ / "a"));
  ASSERT_NO_FATAL_FAILURE(write(dir_ / "b"));
  const auto a = files_of(dir_ / "a"), b = files_of(dir_ / "b");
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(read_file(a[i]), read_file(b[i])) << a[i];
}

TEST_P(BareTensors, RefusesWhatItCannotHold) {
  LayoutRequest request;
  request.tensors = {{"w", DType::kUint8, {Index{1} << 40, Index{1} << 40}, {"w"}, {}}};
  EXPECT_FALSE(format().lay_out(request));
  if (!format().takes_mesh()) {
    request = request_for(format(), values_);
    request.mesh = Mesh({{"tp", 2}});
    EXPECT_FALSE(format().lay_out(request)) << "its row says that it takes no mesh";
  }
}

// A truncated file is an error, unless the missing bytes carry no information.
TEST_P(BareTensors, SeesEveryTruncation) {
  const std::string path = dir_ / "a";
  ASSERT_NO_FATAL_FAILURE(write(path));
  for (const std::string& file : files_of(path)) {
    const std::string whole = read_file(file);
    std::vector<std::size_t> lengths = {0, 1, whole.size() / 2, whole.size() - 1};
    for (int i = 0; i < 30; ++i) lengths.push_back(random_() % whole.size());
    for (const std::size_t length : lengths) {
      write_file(file, std::string_view(whole).substr(0, length));
      if (const auto got = read(path)) {
        EXPECT_EQ(*got, values_) << file << " cut to " << length;
      }
    }
    write_file(file, whole);
  }
}

// A flipped bit outside the tensors is an error, or gives a checkpoint with consistent claims: perhaps other names, but
// no bytes read twice, left out, or outside the file. Values have checksums if the format does.
TEST_P(BareTensors, SurvivesFlippedBits) {
  const std::string path = dir_ / "a";
  ASSERT_NO_FATAL_FAILURE(write(path));
  Index refused = 0;
  for (const std::string& file : files_of(path)) {
    const std::string whole = read_file(file);
    const auto places = places_outside_tensors(path, file, std::ssize(whole));
    for (int i = 0; i < 60 && !places.empty(); ++i) {
      std::string damaged = whole;
      damaged[static_cast<std::size_t>(places[random_() % places.size()])] ^= static_cast<char>(1 << random_() % 8);
      write_file(file, damaged);
      const auto reader = open_with(format(), path);
      refused += !reader;
      if (!reader) continue;
      EXPECT_TRUE(validate((*reader)->catalog()));
      (void)load_values(**reader);
    }
    write_file(file, whole);
  }
  EXPECT_GT(refused, 0);
  const auto again = read(path);
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(*again, values_);
}

INSTANTIATE_TEST_SUITE_P(Targets, BareTensors, testing::ValuesIn(ways_if([](const Way& w) {
                           const Format& f = *w.format;
                           return w.options.empty() && f.open && f.sharding != Sharding::kOwnLocal &&
                                  f.own_names.empty();
                         })),
                         title);

}  // namespace
}  // namespace reshard::targets_test
