// Tests copies of copies: provenance (provenance.h) is kept in every copy, so the final model does not depend on the
// formats in between.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "formats/registry.h"
#include "lib/base/json.h"
#include "lib/checkpoint/side_files.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::second_hop_test {
namespace {

namespace fs = std::filesystem;
using testing::AnyOf;
using testing::HasSubstr;

using Options = std::vector<std::string>;
using Files = std::map<std::string, std::string>;

// Sources with more information than their tensors: a pipeline's layers, buffers, vocabulary padding, names of a model;
// and some without.
const std::vector<std::string> kSources = {"deepspeed/pipe",
                                           "deepspeed/pipe_odd",
                                           "deepspeed/z2_frozen_tied",
                                           "deepspeed/z3_frozen_tied",
                                           "deepspeed/z3_subgroups",
                                           "megatron/dist_tp2_optim",
                                           "megatron/dist_old_tp2_dp2_flat",
                                           "megatron/legacy_pp2_vpp2_dp2_distopt_tied",
                                           "megatron/legacy_tp2_ep2_moe_plain",
                                           "megatron/fsdp_dtensor/iter_0000003",
                                           "colossalai_ranks/ranks",
                                           "torch_save/nested.pt",
                                           "meta/llama2-tp2",
                                           "nanotron/tp2"};

// Returns every target, on one rank and on several, and under other names if the target allows them.
std::vector<Options> ways() {
  std::vector<Options> out = {{"dcp", "--names", "hf"}, {"dcp", "--names", "megatron"}, {"hf", "--names", "keep"}};
  for (const Format* format : formats()) {
    if (!format->lay_out) continue;
    out.push_back({std::string(format->name)});
    if (format->takes_mesh()) out.push_back({std::string(format->name), "--mesh", "tp=2"});
    if (format->takes_mesh() && !format->holds_whole_tensors())
      out.push_back({std::string(format->name), "--mesh", "dp_shard=3"});
  }
  return out;
}

class SecondHop : public testing::Test {
 protected:
  static CommandResult convert(const std::string& from, const std::string& to, const Options& way) {
    Options args = {"convert", from, to, "-q", "--to"};
    args.insert(args.end(), way.begin(), way.end());
    return reshard_cli(args);
  }

  // Returns the files of the model that a checkpoint becomes.
  Files model_of(const std::string& from, const Options& more = {}) {
    const std::string to = dir_ / "model";
    Options way = {"hf"};
    way.insert(way.end(), more.begin(), more.end());
    const CommandResult done = convert(from, to, way);
    EXPECT_EQ(done.exit_code, 0) << from << ": " << done.err;
    Files out = fs::exists(to) ? all_files(to) : Files();
    out.erase(std::string(kManifestFile));
    fs::remove_all(to);
    return out;
  }

  // Converts a checkpoint and moves the copy, so that all recorded paths are wrong. Returns nothing if the target
  // refuses the source with an error.
  std::string hop(const std::string& from, const Options& way) {
    const std::string made = dir_ / "made", moved = dir_ / ("moved" + std::to_string(count_++));
    const CommandResult done = convert(from, made, way);
    if (done.exit_code == 0) {
      fs::rename(made, moved);
      return moved;
    }
    EXPECT_THAT(done.exit_code, AnyOf(2, 4)) << from << " to " << testing::PrintToString(way) << ": " << done.err;
    return "";
  }

  static void expect_same(const Files& got, const Files& wanted, const std::string& what) {
    ASSERT_EQ(got.size(), wanted.size()) << what;
    for (const auto& [name, bytes] : wanted) EXPECT_TRUE(got.contains(name) && got.at(name) == bytes) << what << name;
  }

  static Json manifest_of(const std::string& checkpoint) {
    return *parse_json(read_file(checkpoint + "/" + std::string(kManifestFile)), "manifest");
  }

  TempDir dir_;
  int count_ = 0;
};

TEST_F(SecondHop, EndsWhereTheDirectWayDoes) {
  const std::vector<Options> all = ways();
  const auto step = static_cast<std::size_t>(soak_is_asked() ? 1 : every_nth(8) * 7);
  std::size_t taken = 0, first = 0;  // a few other targets for each source
  for (const std::string& source : kSources) {
    const Files wanted = model_of(test_data(source));
    for (std::size_t w = first++ % step; w < all.size(); w += step) {
      const Options& way = all[w];
      const std::string middle = hop(test_data(source), way);
      if (middle.empty()) continue;
      expect_same(model_of(middle), wanted, source + " by " + testing::PrintToString(way) + ": ");
      fs::remove_all(middle);
      ++taken;
    }
  }
  EXPECT_GT(taken * step, 150U);
}

// Targets that keep the source's names need the most provenance.
TEST_F(SecondHop, EndsThereUnderTheSourcesNames) {
  for (const std::string& source : sampled({kSources[0], kSources[2], kSources[5], kSources[10]}, 2)) {
    const Files wanted = model_of(test_data(source));
    for (const Options& way :
         {Options{"dcp"}, {"dcp", "--mesh", "dp_shard=2"}, {"torch_checkpointing"}, {"hdf5"}, {"orbax"}})
      expect_same(model_of(hop(test_data(source), way)), wanted, source + " by " + way[0] + ": ");
  }
}

TEST_F(SecondHop, EndsThereAfterThree) {
  for (const std::string& source : sampled({kSources[0], kSources[2], kSources[5], kSources[7], kSources[11]}, 3)) {
    std::string at = test_data(source);
    const Files wanted = model_of(at);
    for (const Options& way : {Options{"dcp", "--mesh", "dp_shard=2"}, {"hdf5"}, {"torch_checkpointing"}}) {
      at = hop(at, way);
      ASSERT_FALSE(at.empty()) << source;
    }
    expect_same(model_of(at), wanted, source + ": ");
  }
}

TEST_F(SecondHop, OfSomeTensorsIsOfThoseAlone) {
  const std::string pipe = test_data("deepspeed/pipe");
  const Options some = {"--include", "1.*", "--include", "2.*"};
  const std::string middle = hop(pipe, {"dcp", some[0], some[1], some[2], some[3]});
  expect_same(model_of(middle, {"--allow", "config"}), model_of(pipe, some), "layers 1 and 2: ");
}

TEST_F(SecondHop, PaddingThatWasAddedIsCutAgain) {
  const std::string source = sample("tp8") + "/hf.safetensors", config = sample("tp8") + "/config.json";
  const Files wanted = model_of(source, {"--config", config});
  const std::string middle =
      hop(source, {"dcp", "--vocab-divisible-by", "96", "--vocab-padding", "mean", "--config", config});
  expect_same(model_of(middle), wanted, "rows of the mean: ");
}

TEST_F(SecondHop, VerifyKnowsWhatTheSourceTold) {
  for (const char* source : {"megatron/dist_tp2_optim", "deepspeed/z2_frozen_tied", "deepspeed/pipe"}) {
    const std::string middle = hop(test_data(source), {"dcp"});
    const CommandResult verified = reshard_cli({"verify", middle, "--fail-on", "warning"});
    EXPECT_EQ(verified.exit_code, 0) << source << ": " << verified.out << verified.err;
    const CommandResult inspected = reshard_cli({"inspect", middle, "--json"});
    EXPECT_THAT(inspected.out, HasSubstr("\"made from\"")) << source;
  }
}

// Provenance is used only for the files with which it was written; a manifest from elsewhere changes nothing.
TEST_F(SecondHop, AManifestOfOtherFilesIsNotUsed) {
  const std::string middle = hop(test_data("megatron/dist_tp2_optim"), {"dcp"}), to = dir_ / "model";
  const std::string manifest = middle + "/" + std::string(kManifestFile), whole = read_file(manifest);
  for (const bool is_json : {true, false}) {
    const std::size_t files = whole.find("\"files\""),
                      size = whole.find_first_of("123456789", whole.find(": ", files + 9));
    ASSERT_NE(size, std::string::npos);
    std::string other = whole;
    if (is_json)
      other[size] = other[size] == '9' ? '8' : static_cast<char>(other[size] + 1);
    else
      other.resize(other.find("\"vocabulary\""));
    write_file(manifest, other);
    const CommandResult done = convert(middle, to, {"hf"});
    EXPECT_EQ(done.exit_code, 3) << done.err;
    EXPECT_THAT(done.err, HasSubstr("--repair vocab"));
    EXPECT_FALSE(fs::exists(to));
    const CommandResult inspected = reshard_cli({"inspect", middle});
    EXPECT_EQ(inspected.exit_code, 0) << inspected.err;
    EXPECT_THAT(inspected.out, HasSubstr("provenance is ignored"));
  }
  write_file(manifest, whole);
  EXPECT_FALSE(model_of(middle).empty());
}

// JSON is UTF-8, and paths and patterns need not be.
TEST_F(SecondHop, PathsThatAreNotUtf8DoNotBreakTheManifest) {
  const std::string from = dir_ / "st\xe9p", once = dir_ / "once", twice = dir_ / "twice";
  fs::copy(sample("tp8") + "/checkpoint", from);
  fs::copy(sample("tp8") + "/config.json", from);
  const Options options = {"dcp", "--exclude", "caf\xe9*", "--keep-dtype", "caf\xe9*"};
  const CommandResult first = convert(from, once, options);
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_THAT(read_file(once + "/" + std::string(kManifestFile)), HasSubstr(R"(st\\xe9p")"));
  const CommandResult second = convert(once, twice, {"hf"});
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_EQ(reshard_cli({"verify", twice}).exit_code, 0);
}

TEST_F(SecondHop, TheManifestSaysWhatIsKnown) {
  const Json pipe = manifest_of(hop(test_data("deepspeed/pipe"), {"dcp"}));
  const Json* const provenance = pipe.find("provenance");
  ASSERT_TRUE(provenance && provenance->find("keys"));
  EXPECT_EQ(*provenance->find("keys")->get_string("0.word_embeddings.weight"), "model.embed_tokens.weight");
  EXPECT_THAT(std::string(*provenance->get_string("written_by")), HasSubstr("DeepSpeed"));
  const Json padded = manifest_of(hop(test_data("megatron/dist_tp2_optim"), {"dcp"}));
  EXPECT_EQ(*padded.find("provenance")->get_index("vocabulary"), 257);
  const Json buffered = manifest_of(hop(test_data("deepspeed/z2_frozen_tied"), {"dcp"}));
  EXPECT_EQ(buffered.find("provenance")->get_array("buffers")->size(), 1U);
  EXPECT_FALSE(buffered.find("provenance")->contains("keys"));
  const Json model = manifest_of(hop(test_data("torch_save/nested.pt"), {"dcp"}));
  EXPECT_TRUE(*model.find("provenance")->get_bool("model_names"));
}

}  // namespace
}  // namespace reshard::second_hop_test
