// Tests what reshard verify says besides the output for each kind of fault (audit_golden_test.cc): facts, JSON, JUnit,
// exit codes, and that healthy checkpoints have no finding.
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

namespace reshard::audit_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

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
  EXPECT_TRUE(json.find("against")->is_null());
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
  w.must({"convert", "ck", "model", "--to", "hf", "-q"});
  fs::resize_file(w / "model/model.safetensors", 5);  // no other file holds the shapes that would show the fault
  expect({"model"}, 3, "model/model.safetensors@0x0: safetensors header: expected 8 bytes of length, got 5");
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

// torch pickles a nested state whole if the planner has flatten_state_dict=False.
TEST(Audit, AModelInAnObjectIsNotRead) {
  const TempDir dir;
  const std::string source = test_data("dcp_small/unflattened");
  const CommandResult r = reshard_cli({"verify", source, "--fail-on", "warning"});
  EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
  EXPECT_THAT(r.out, HasSubstr("note      there are no tensors, only 2 objects: 'model', 'step'"));
  EXPECT_THAT(r.out, Not(HasSubstr("cover")));
  const CommandResult converted = reshard_cli({"convert", source, dir / "out", "--to", "hf"});
  EXPECT_EQ(converted.exit_code, 2);
  EXPECT_THAT(converted.err, HasSubstr("contains no tensors, only objects"));
}

}  // namespace
}  // namespace reshard::audit_test
