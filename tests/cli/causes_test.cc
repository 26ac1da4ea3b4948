// Tests that one cause gives one finding: if the mesh or the config is not the checkpoint's, verify reports that and
// not its consequences.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/must.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::causes_test {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

std::vector<std::string> findings_of(const Json& report) {
  std::vector<std::string> out;
  const auto findings = *report.get_array("findings");
  for (const Json& f : findings) out.emplace_back(*f.get_string("id"));
  return out;
}

Json report_of(const std::vector<std::string>& arguments) {
  const CommandResult r = reshard_cli(arguments, {"--json"});
  auto parsed = parse_json(r.out, "out");
  EXPECT_TRUE(parsed) << r.err;
  return parsed ? *std::move(parsed) : Json();
}

// A skipped check reports no tensors checked and no findings.
void expect_skipped_are_empty(const Json& report) {
  const auto checks = *report.get_array("checks");
  for (const Json& check : checks)
    if (!check.find("skipped")->is_null()) {
      EXPECT_EQ(*check.get_index("looked_at"), 0) << *check.get_string("id");
      EXPECT_EQ(*check.get_index("findings"), 0) << *check.get_string("id");
    }
}

// The digests of the tensors that were read, by name.
std::map<std::string, std::string> digests_of(const Json& report) {
  std::map<std::string, std::string> out;
  const auto tensors = *report.get_array("tensors");
  for (const Json& t : tensors) out.emplace(*t.get_string("name"), *t.get_string("digest"));
  return out;
}

// The tensors of the only finding, which must have this id.
std::set<std::string> tensors_of_finding(const Json& report, const std::string& id) {
  EXPECT_THAT(findings_of(report), ElementsAre(id));
  std::set<std::string> out;
  const auto findings = *report.get_array("findings");
  for (const Json& name : *findings.front().get_array("tensors")) out.emplace(*name.as_string());
  return out;
}

// Expects that verify reports these tensors with this finding, and reads all others.
void expect_rest_read(const std::string& path, const std::string& id, std::map<std::string, std::string> healthy,
                      const std::set<std::string>& damaged) {
  const Json report = report_of({"verify", path});
  EXPECT_EQ(tensors_of_finding(report, id), damaged) << path;
  EXPECT_EQ(std::erase_if(healthy, [&](const auto& t) { return damaged.contains(t.first); }), damaged.size()) << path;
  EXPECT_FALSE(healthy.empty()) << path;
  EXPECT_EQ(digests_of(report), healthy) << path;
  expect_skipped_are_empty(report);
}

// Copies a checkpoint to `bad` and changes the copy.
void damage(const std::string& good, const std::string& bad, const std::function<void()>& change) {
  fs::remove_all(bad);
  fs::copy(good, bad, fs::copy_options::recursive);
  change();
}

class WrongMesh : public testing::TestWithParam<const char*> {};

TEST_P(WrongMesh, IsOneFindingAndNoRankDied) {
  for (const char* mesh : {"tp=12", "dp_shard=20", "dp_shard=3", "pp=4", "dp_shard=2,tp=16", "pp=2,dp_shard=10"}) {
    const Json report = report_of({"verify", sample(GetParam()) + "/checkpoint", "--mesh", mesh});
    const std::vector<std::string> ids = findings_of(report);
    EXPECT_EQ(ids.size(), 1U) << mesh << testing::PrintToString(ids);
    EXPECT_THAT(ids, testing::Each(testing::Ne("ranks-silent"))) << mesh;
    expect_skipped_are_empty(report);
  }
}

INSTANTIATE_TEST_SUITE_P(Causes, WrongMesh,
                         testing::Values("tp8", "fsdp16", "hsdp2x4", "fsdp4_tp2", "pp2_tp4", "single",
                                         "fsdp2_tp2_optim"),
                         [](const auto& param) { return param.param; });

// The finding lists each size on which all tensors agree, and nothing else. Layers, words and dtypes come from another
// model too.
TEST(Causes, AnotherModelsConfigIsOneFinding) {
  const std::string configs = RESHARD_TEST_DATA "/configs/";
  for (const auto& [model, other, says] :
       {std::tuple("qwen2-7b", "qwen2.5-0.5b", "hidden_size 896, and 219 tensors of the checkpoint have 3,584"),
        std::tuple("llama-2-7b", "llama-3.1-70b", "intermediate_size 28,672, and 96 tensors of the checkpoint have"),
        std::tuple("llama-3.1-70b", "llama-2-7b", "hidden_size 4,096, and ")}) {
    const TempDir dir;
    const CommandResult made =
        reshard_cli({"synth", dir / "ck", "--config", configs + model + ".json", "--to", "hf", "--headers-only", "-q"});
    ASSERT_EQ(made.exit_code, 0) << made.err;
    const Json report = report_of({"verify", dir / "ck", "--config", configs + other + ".json"});
    EXPECT_THAT(findings_of(report), ElementsAre("config-other")) << model << other;
    EXPECT_THAT(to_text(report), HasSubstr(says));
    EXPECT_THAT(to_text(report), HasSubstr("this explains "));
    expect_skipped_are_empty(report);
    EXPECT_EQ(findings_of(report_of({"verify", dir / "ck", "--config", configs + model + ".json"})).size(), 0U);
  }
}

// A width that is a multiple of the tensors' looks like a cut of each of them.
TEST(Causes, AConfigOfTwiceTheWidthIsOneFinding) {
  const TempDir dir;
  std::string config = read_file(sample("tp8") + "/config.json");
  config.replace(config.find("\"hidden_size\": 64"), 17, "\"hidden_size\": 128");
  dir.write("config.json", config);
  const Json report = report_of({"verify", sample("tp8") + "/checkpoint", "--config", dir / "config.json"});
  EXPECT_THAT(findings_of(report), ElementsAre("config-other"));
  EXPECT_THAT(to_text(report), HasSubstr("hidden_size 128, and "));
}

// Only one size differs, as between models of equal width. A tensor that is also broken is still reported.
TEST(Causes, WhatTheConfigDoesNotExplainIsReported) {
  const TempDir dir;
  const std::string config = read_file(RESHARD_TEST_DATA "/configs/llama-3.1-8b.json");
  std::string other = config;
  other.replace(other.find("14336"), 5, "11008");
  dir.write("config.json", config);
  dir.write("other.json", other);
  const auto made = reshard_cli({"synth", dir / "ck", "--config", dir / "config.json", "--to", "hf", "--headers-only",
                                 "--shape", "model.layers.3.self_attn.o_proj.weight=4000x4000", "-q"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  const Json report = report_of({"verify", dir / "ck", "--config", dir / "other.json"});
  EXPECT_THAT(to_text(report), HasSubstr("intermediate_size 11,008, and 96 tensors of the checkpoint have 14,336"));
  EXPECT_THAT(findings_of(report), ElementsAre("config-other", "shape-other"));
}

TEST(Causes, ADamagedFileOfAModelHidesNoOther) {
  const TempDir dir;
  const std::pair<std::string, std::string> formats[] = {{"hf", "model.safetensors.index.json"},
                                                         {"bin", "pytorch_model.bin.index.json"}};
  for (const auto& [format, index_name] : formats) {
    const std::string good = dir / format, bad = dir / "bad";
    ASSERT_EQ(
        reshard_cli({"convert", sample_checkpoint("tp8"), good, "--to", format, "--max-shard-size", "100kB"}).exit_code,
        0);
    const auto healthy = digests_of(report_of({"verify", good}));
    const Json index = must(parse_json(read_file(good + "/" + index_name), index_name));
    std::map<std::string, std::set<std::string>> tensors;  // by file
    for (const Json::Member& m : must(index.find("weight_map")->as_object()))
      tensors[std::string(must(m.value.as_string()))].insert(m.key);
    ASSERT_GT(tensors.size(), 2U);
    const auto& [file, of_file] = *std::next(tensors.begin());
    const std::string path = bad + "/" + file;
    const std::function<void()> changes[] = {[&] { fs::remove(path); }, [&] { write_file(path, ""); },
                                             [&] { write_file(path, std::string(fs::file_size(path), 'x')); }};
    for (const auto& change : changes) {
      damage(good, bad, change);
      expect_rest_read(bad, "file-unreadable", healthy, of_file);
    }
    if (format != "hf") continue;  // torch.save has its directory at the end
    damage(good, bad, [&] {
      fs::resize_file(path, fs::file_size(path) - 7);
      fs::remove(bad + "/reshard_manifest.json");  // it records the sizes of the files
    });
    const Json cut = report_of({"verify", bad});
    EXPECT_EQ(tensors_of_finding(cut, "file-short"), of_file);
    EXPECT_EQ(digests_of(cut).size(), healthy.size() - 1);  // all but the last one of the file
    // Without an index, the numbers in the names show that a file is missing, but not what it held.
    fs::remove(bad + "/" + index_name);
    fs::remove(path);
    const Json gap = report_of({"verify", bad});
    EXPECT_TRUE(tensors_of_finding(gap, "file-unreadable").empty());
    EXPECT_EQ(digests_of(gap).size(), healthy.size() - of_file.size());
  }
}

// Returns the first finding with this id as JSON.
std::string text_of_finding(const Json& report, const std::string& id) {
  EXPECT_THAT(findings_of(report), testing::Contains(id));
  const auto findings = *report.get_array("findings");
  for (const Json& f : findings)
    if (*f.get_string("id") == id) return to_text(f);
  return "";
}

// If the files of an index have all tensors, and the index is wrong, there is nothing to restore.
TEST(Causes, AWrongIndexIsNoLostFile) {
  const TempDir dir;
  struct IndexedFormat {
    std::string format, index_name, new_name;
  };
  for (const IndexedFormat& f :
       {IndexedFormat{"hf", "model.safetensors.index.json", "model-00001-of-00009.safetensors"},
        IndexedFormat{"bin", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00009.bin"}}) {
    const std::string &format = f.format, &index_name = f.index_name, &new_name = f.new_name;
    SCOPED_TRACE(format);
    const std::string good = dir / format, bad = dir / "bad", index = bad + "/" + index_name, out = dir / "out";
    ASSERT_EQ(
        reshard_cli({"convert", sample_checkpoint("tp8"), good, "--to", format, "--max-shard-size", "100kB"}).exit_code,
        0);
    fs::remove(good + "/reshard_manifest.json");
    const std::string norm = "model.norm.weight";
    const Json map = *must(parse_json(read_file(good + "/" + index_name), index_name)).find("weight_map");
    const std::string file(must(map.get_string(norm))), lost(must(map.get_string("model.embed_tokens.weight")));
    ASSERT_NE(file, lost);
    const auto rename_in_index = [&](const std::string& from, const std::string& to) {
      std::string text = read_file(index);
      for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
        text.replace(at, from.size(), to);
      write_file(index, text);
    };
    const auto expect = [&](const std::string& why, const std::string& lost_files, int exit_code) {
      const std::string finding = text_of_finding(report_of({"verify", bad}), "file-unreadable");
      EXPECT_THAT(finding, HasSubstr(why));
      const CommandResult refused = reshard_cli({"convert", bad, out, "--to", "dcp"});
      EXPECT_EQ(refused.exit_code, exit_code);
      EXPECT_THAT(refused.err, HasSubstr(why));
      if (lost_files.empty()) {
        EXPECT_THAT(finding, HasSubstr("Correct the index, or save the model again."));
        EXPECT_THAT(finding, Not(HasSubstr("estore")));
        EXPECT_THAT(refused.err, Not(HasSubstr("estore ")));
      } else {
        EXPECT_THAT(finding, HasSubstr("Restore " + lost_files + " from another copy"));
        EXPECT_THAT(refused.err, HasSubstr("; restore " + lost_files + " from another copy"));
      }
      return finding + refused.err;
    };
    // The norm is in `file`, and the index names another file for it.
    const std::string entry = "\"" + norm + "\": \"";
    damage(good, bad, [&] { rename_in_index(entry + file, entry + lost); });
    expect("; it is in " + file + ": correct the index, or save the model again", "", 3);
    damage(good, bad, [&] { rename_in_index(entry + file, entry + "gone"); });
    const std::string said =
        expect("its tensors are in " + file + ": correct the index, or save the model again", "", 5);
    EXPECT_THAT(said, Not(HasSubstr("Only the copy that the index names is read")));
    // Another file is lost, too.
    fs::remove(bad + "/" + lost);
    expect("its tensors are in " + file + ": correct the index", "the others", 5);
    // All of a file's entries name another file. Which of the two is of this save, the files do not tell.
    damage(good, bad, [&] { fs::rename(bad + "/" + file, bad + "/" + new_name); });
    expect(new_name + ", which the index does not name, has its tensors: correct the index if that file is of the same",
           "it", 5);
    // A lost file, of whose tensors others have a part.
    damage(good, bad, [&] { fs::remove(bad + "/" + lost); });
    rename_in_index(entry + file, entry + lost);
    EXPECT_THAT(expect(lost + ": cannot open", "it", 5), Not(HasSubstr("correct the index")));
  }
}

TEST(Causes, ADamagedFileOfAParameterHidesNoOther) {
  const TempDir dir;
  const std::string good = test_data("nanotron/tp2"), bad = dir / "bad";
  const auto healthy = digests_of(report_of({"verify", good}));
  const std::string embedding = "model.token_position_embeddings.pp_block.token_embedding.weight";
  const std::string file = bad + "/10/model/model/token_position_embeddings/pp_block/token_embedding/" +
                           "model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors";
  for (const std::function<void()>& change :
       {std::function<void()>([&] { fs::remove(file); }), std::function<void()>([&] { write_file(file, "x"); })}) {
    damage(good, bad, change);
    expect_rest_read(bad, "file-unreadable", healthy, {embedding});
  }
}

// What is wrong in the other files is still found.
TEST(Causes, ADamagedFileHidesNoOtherDamage) {
  const TempDir dir;
  const std::string model = dir / "model";
  ASSERT_EQ(
      reshard_cli({"convert", sample_checkpoint("tp8"), model, "--to", "hf", "--max-shard-size", "100kB"}).exit_code,
      0);
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(model))
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  ASSERT_GT(files.size(), 2U);
  write_file(files[0], "no header");
  std::string bytes = read_file(files[2]);
  bytes.back() ^= 1;
  write_file(files[2], bytes);
  EXPECT_EQ(reshard_cli({"verify", model}).exit_code, 1);
  EXPECT_THAT(findings_of(report_of({"verify", model})), ElementsAre("file-unreadable", "manifest-digest"));
}

// A checkpoint of rank files, and some of these.
struct RankFiles {
  std::string name, path;  // below tests/data
  std::vector<std::string> files;
  bool has_more = false;  // some tensors cannot be named, or placed, without the damaged files
};

class DamagedRankFiles : public testing::TestWithParam<RankFiles> {
 protected:
  // Calls `check` with the first of the files damaged, and with all, each emptied and cut short.
  void for_each_damage(
      const std::function<void(const std::string& bad, const std::vector<std::string>& files)>& check) {
    const TempDir dir;
    std::string good = test_data(GetParam().path);
    if (GetParam().path == "vllm" || GetParam().path == "ranks") {
      good = dir / "good";
      const std::string from = sample("tp8");
      const CommandResult made = reshard_cli({"convert", from + "/checkpoint", good, "--to", GetParam().path, "--mesh",
                                              "tp=4", "--config", from + "/config.json", "-q"});
      ASSERT_EQ(made.exit_code, 0) << made.err;
      fs::copy_file(from + "/config.json", good + "/config.json", fs::copy_options::overwrite_existing);
    }
    good_ = good;
    const std::string bad = dir / "bad";
    const auto& all = GetParam().files;
    for (const auto& files : {std::vector<std::string>{all.front()}, all})
      for (const std::uintmax_t bytes : {0, 50}) {
        SCOPED_TRACE(std::to_string(files.size()) + " files of " + std::to_string(bytes) + " bytes");
        damage(good, bad, [&] {
          for (const std::string& file : files) {
            ASSERT_TRUE(fs::exists(bad + "/" + file)) << file;
            fs::resize_file(bad + "/" + file, bytes);
          }
        });
        check(bad, files);
        const CommandResult converted = reshard_cli({"convert", bad, dir / "out", "--to", "dcp", "--names", "keep"});
        EXPECT_EQ(converted.exit_code, 3);
        for (const std::string& file : files) EXPECT_THAT(converted.err, HasSubstr(file));
        EXPECT_FALSE(fs::exists(dir / "out"));
      }
  }

  std::string good_;
};

using RestOfRankFiles = DamagedRankFiles;

// verify and inspect name all damaged files and the tensors that lack parts, and read the others.
TEST_P(RestOfRankFiles, IsRead) {
  for_each_damage([&](const std::string& bad, const std::vector<std::string>& files) {
    const Json before = report_of({"verify", good_}), report = report_of({"verify", bad});
    std::map<std::string, std::string> healthy = digests_of(before);
    std::vector<std::string> ids = findings_of(before);
    ids.emplace_back("file-unreadable");
    EXPECT_THAT(ids, testing::IsSupersetOf(findings_of(report)));
    EXPECT_THAT(findings_of(report), testing::Contains("file-unreadable"));
    std::set<std::string> lacking;
    const auto findings = *report.get_array("findings");
    for (const Json& f : findings) {
      if (*f.get_string("id") != "file-unreadable") continue;
      for (const Json& tensor : *f.get_array("tensors")) lacking.emplace(*tensor.as_string());
      for (const std::string& file : files) EXPECT_THAT(to_text(*f.find("why")), HasSubstr(file));
    }
    EXPECT_FALSE(lacking.empty());
    std::set<std::string> stored;  // the tensors with a piece in the damaged files
    std::map<std::string, std::string> shapes;
    const Json inspected = report_of({"inspect", good_, "--shards"});
    for (const Json& tensor : *inspected.get_array("tensors"))
      shapes.emplace(*tensor.get_string("name"), to_text(*tensor.find("shape")));
    const Json seen_rest = report_of({"inspect", bad});
    for (const Json& tensor : *seen_rest.get_array("tensors"))
      EXPECT_EQ(to_text(*tensor.find("shape")), shapes[std::string(*tensor.get_string("name"))])
          << *tensor.get_string("name");
    for (const Json& tensor : *inspected.get_array("tensors"))
      for (const Json& shard : *tensor.get_array("shards"))
        for (const std::string& file : files)
          if (file.ends_with(*shard.get_string("file"))) stored.emplace(*tensor.get_string("name"));
    EXPECT_TRUE(GetParam().has_more || std::includes(stored.begin(), stored.end(), lacking.begin(), lacking.end()));
    const auto rest = digests_of(report);
    for (const auto& [name, digest] : rest) EXPECT_EQ(digest, healthy[name]) << name;
    for (const auto& [name, digest] : healthy)
      EXPECT_TRUE(rest.contains(name) || lacking.contains(name) || GetParam().has_more) << name;
    EXPECT_FALSE(rest.empty());
    EXPECT_EQ(reshard_cli({"verify", bad}).exit_code, 1);
    const CommandResult seen = reshard_cli({"inspect", bad}, {"--json"});
    EXPECT_EQ(seen.exit_code, 3);
    for (const std::string& file : files) EXPECT_THAT(seen.out, HasSubstr(file));
    EXPECT_THAT(seen.out, HasSubstr(" parts or all of "));
  });
}

const std::string kZero = "global_step1/zero_pp_rank_", kBf16 = "global_step1/bf16_zero_pp_rank_";
const std::string kOptim = "_mp_rank_00_optim_states.pt", kModel = "_mp_rank_00_model_states.pt";
const std::string kRanked = "iter_0000010/mp_rank_";

INSTANTIATE_TEST_SUITE_P(
    Causes, RestOfRankFiles,
    testing::Values(
        RankFiles{"zero2", "deepspeed/z2_align", {kBf16 + "1" + kOptim}},
        RankFiles{
            "zero3", "deepspeed/z3_frozen_tied", {kZero + "1" + kModel, kBf16 + "0" + kOptim, kZero + "2" + kModel}},
        RankFiles{
            "autotp", "deepspeed/z1_autotp", {"global_step1/mp_rank_01_model_states.pt", kBf16 + "1" + kOptim}, true},
        RankFiles{"pipeline",
                  "deepspeed/pipe_tp2",
                  {"global_step1/layer_01-model_01-model_states.pt", "global_step1/layer_02-model_00-model_states.pt",
                   "global_step1/layer_03-model_01-model_states.pt"}},
        RankFiles{"megatron", "megatron/legacy_tp2_ep2_moe_plain", {kRanked + "01_001/model_optim_rng.pt"}, true},
        RankFiles{"meta", "meta/llama2-tp2", {"consolidated.01.pth"}},
        RankFiles{"torch_checkpointing",
                  "torch_checkpointing/fsdp2/step-2",
                  {"model_1.pt", "optimizer_0.pt", "lr_scheduler_1.pt"}},
        RankFiles{"colossalai",
                  "colossalai_real/tied_pp2/modeling",
                  {"pytorch_model-stage-00001-shard-00002.bin", "pytorch_model-stage-00002-shard-00001.bin",
                   "pytorch_model-stage-00002-shard-00002.bin"}},
        RankFiles{"colossalai_ranks",
                  "colossalai_ranks/ranks",
                  {"model-rank1-shard0.bin", "optim-rank2-shard0.bin", "model-rank3-shard0.bin"}},
        RankFiles{"fsdp",
                  "fsdp/fsdp2_tp2",
                  {"model_world_size_6_rank_1.pt", "model_world_size_6_rank_4.pt", "optim_world_size_6_rank_2.pt"}},
        RankFiles{
            "vllm",
            "vllm",
            {"model-rank-1-part-0.safetensors", "model-rank-0-part-0.safetensors", "model-rank-3-part-0.safetensors"}}),
    [](const auto& param) { return param.param.name; });

using RankFilesThatAllNeed = DamagedRankFiles;

// Without some files nothing can be read; all damaged ones are named nevertheless.
TEST_P(RankFilesThatAllNeed, AreNamed) {
  for_each_damage([&](const std::string& bad, const std::vector<std::string>& files) {
    for (const std::string command : {"verify", "inspect"}) {
      const CommandResult r = reshard_cli({command, bad});
      EXPECT_EQ(r.exit_code, 3) << command;
      for (const std::string& file : files) EXPECT_THAT(r.err, HasSubstr(file)) << command;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Causes, RankFilesThatAllNeed,
    testing::Values(
        RankFiles{"zero2",
                  "deepspeed/z2_align",
                  {"global_step1/mp_rank_00_model_states.pt", kBf16 + "0" + kOptim, kBf16 + "1" + kOptim}},
        RankFiles{"universal",
                  "deepspeed/z1_universal",
                  {"global_step1_universal/mp_rank_00_model_states.pt",
                   "global_step1_universal/zero/lm_head.weight/exp_avg.pt"}},
        RankFiles{"megatron_stages",
                  "megatron/legacy_pp2_vpp2_dp2_distopt_tied",
                  {kRanked + "00_000/model_optim_rng.pt", kRanked + "00_001/distrib_optim.pt"}},
        RankFiles{"colossalai_ranks",
                  "colossalai_ranks/ranks",
                  {"global_meta.bin", "meta-rank1.bin", "model-rank2-shard0.bin"}},
        RankFiles{"ranks", "ranks", {"rank-00001.safetensors", "rank-00003.safetensors", "rank-00000.safetensors"}}),
    [](const auto& param) { return param.param.name; });

TEST(Causes, ADamagedFileOfRanksHidesNoWholeTensor) {
  const TempDir dir;
  const std::string good = sample_checkpoint("tp8"), bad = dir / "bad", file = bad + "/__3_0.distcp";
  const auto healthy = digests_of(report_of({"verify", good}));
  damage(good, bad, [&] { fs::remove(file); });
  const std::set<std::string> cut = tensors_of_finding(report_of({"verify", bad}), "file-missing");
  EXPECT_EQ(cut.size(), 31U);  // of 39
  expect_rest_read(bad, "file-missing", healthy, cut);
  damage(good, bad, [&] { write_file(file, std::string(fs::file_size(file), 'x')); });
  expect_rest_read(bad, "header", healthy, cut);
  // The end of the archive in which one tensor's piece is stored.
  damage(good, bad, [&] {
    std::string bytes = read_file(file);
    const std::size_t at = bytes.find("PK\x05\x06");
    ASSERT_NE(at, bytes.npos);
    bytes[at] = 'x';
    write_file(file, bytes);
  });
  const std::set<std::string> one = tensors_of_finding(report_of({"verify", bad}), "header");
  EXPECT_EQ(one.size(), 1U);
  expect_rest_read(bad, "header", healthy, one);
}

TEST(Causes, ADamagedTensorHidesNoOther) {
  const TempDir dir;
  const std::string good = sample_checkpoint("tp8"), bad = dir / "bad", file = bad + "/__3_0.distcp";
  const auto healthy = digests_of(report_of({"verify", good}));
  const TensorValues values = load_checkpoint(good);
  const std::set<std::string> damaged = {"layers.0.feed_forward.w1.weight", "layers.2.feed_forward.w1.weight"};
  damage(good, bad, [&] {
    std::string bytes = read_file(file);
    for (const std::string& name : damaged) {
      const std::size_t at = bytes.find(values.at(name).bytes.substr(3 * 22 * 64 * 2, 64));  // rank 3 has 22 rows
      ASSERT_NE(at, bytes.npos);
      bytes[at] ^= 1;
    }
    write_file(file, bytes);
  });
  expect_rest_read(bad, "bytes-damaged", healthy, damaged);
  const Json by_values = report_of({"verify", bad, "--values"});
  EXPECT_EQ(tensors_of_finding(by_values, "bytes-damaged"), damaged);
  EXPECT_EQ(digests_of(by_values).size(), healthy.size() - 2);
}

}  // namespace
}  // namespace reshard::causes_test
