#include "formats/nanotron/nanotron.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>

#include "formats/registry.h"
#include "lib/model/config.h"
#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::nanotron_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// Written like nanotron's code does: one save with rows in rotary pairs, as before rope_interleaved, and one in halves,
// tied and on two pipeline stages.
const char* const kSaves[] = {"tp2", "tp2-pp2-tied"};
constexpr const char* kQkv = "/10/model/model/decoder/1/pp_block/attn/qkv_proj/";

class Nanotron : public testing::Test {
 protected:
  std::string copy(const std::string& name) {
    const std::string path = dir_ / name;
    fs::copy(test_data("nanotron/" + name), path, fs::copy_options::recursive);
    return path;
  }
  const TempDir dir_;
};

TEST_F(Nanotron, BecomesTheModel) {
  for (const std::string name : kSaves) {
    const std::string source = test_data("nanotron/" + name), out = dir_ / name;
    const CommandResult r = reshard_cli({"convert", source, out, "--to", "hf", "-q"});
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_EQ(digests_of(load_checkpoint(out)), read_digests(source + ".hf.json")) << name;
    const auto config = read_config(out + "/config.json");
    ASSERT_TRUE(config) << config.error().message();
    EXPECT_EQ(config->architecture, "LlamaForCausalLM");
    EXPECT_EQ(config->number("intermediate_size"), 40);
    EXPECT_EQ(config->tie_word_embeddings(), name == "tp2-pp2-tied");
    for (const std::string& path : {source, source + "/10", out}) {
      const CommandResult verified = reshard_cli({"verify", path, "--fail-on", "warning"});
      EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
    }
  }
}

TEST_F(Nanotron, ItsNamesAreOnesToConvertTo) {
  const std::string source = test_data("nanotron/tp2"), out = dir_ / "dcp";
  const CommandResult r = reshard_cli({"convert", source, dir_ / "hf", "--to", "hf", "-q"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const CommandResult back = reshard_cli({"convert", dir_ / "hf", out, "--to", "dcp", "--names", "nanotron", "-q"});
  ASSERT_EQ(back.exit_code, 0) << back.err;
  EXPECT_EQ(load_checkpoint(out), load_checkpoint(source));
}

TEST_F(Nanotron, MissingFilesAreNamed) {
  const std::string path = copy("tp2");
  const std::string cut = path + kQkv + "model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors";
  const std::string bytes = read_file(cut);
  fs::remove(cut);
  EXPECT_THAT(error_of_opening(path),
              HasSubstr("the file of tensor 'model.decoder.1.pp_block.attn.qkv_proj.weight' of tp rank 1 "
                        "of 2 is missing"));
  write_file(cut, bytes);
  fs::remove(path + "/10/model_config.json");
  EXPECT_EQ(error_of_opening(path), "D/10/model_config.json: file is missing");
  write_file(path + "/10/model_config.json", "[]");
  EXPECT_THAT(error_of_opening(path), HasSubstr("D/10/model_config.json"));
  write_file(path + "/10/model_config.json", R"({"num_attention_heads": 7, "hidden_size": 64})");
  EXPECT_THAT(error_of_opening(path), HasSubstr("D/10/model_config.json: 7 heads"));
  // latest.txt names the newest step.
  write_file(path + "/latest.txt", "../10");
  EXPECT_FALSE(recognises(kNanotronFormat, path));
  EXPECT_TRUE(recognises(kNanotronFormat, path + "/10"));
}

TEST_F(Nanotron, DamagedFilesAreRefused) {
  const std::string path = copy("tp2-pp2-tied");
  const std::string cut = path + kQkv + "model_weight_pp-rank-1-of-2_tp-rank-1-of-2.safetensors";
  const std::string whole = read_file(cut);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string damaged = whole;
    const std::size_t at = damaged.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    EXPECT_EQ(from.size(), to.size());
    damaged.replace(at, from.size(), to);
    write_file(cut, damaged);
    return error_of_opening(path);
  };
  EXPECT_THAT(with("(128, 64)", "(128, 63)"), HasSubstr("slice"));
  EXPECT_THAT(with("(128, 64)", "(128; 64)"), HasSubstr("unsharded_shape: expected a shape"));
  EXPECT_THAT(with("(128, 64)", "(256, 64)"), HasSubstr("expected a part of bfloat16 [128, 64]"));
  EXPECT_THAT(with("#80,96,None", "#80,97,None"), HasSubstr("expected slices of one shape"));
  EXPECT_THAT(with("#80,96,None", "#64,80,None"), HasSubstr("qkv_proj.weight"));  // leaves a hole
  EXPECT_THAT(with("#80,96,None", "#8x,96,None"), HasSubstr("expected a number or None"));
  EXPECT_THAT(with("32,48,None|", "32,48,2   |"), HasSubstr("local_global_slices_pairs"));
  EXPECT_THAT(with("\"data\"", "\"dato\""), HasSubstr("expected one tensor 'data'"));
  for (const std::size_t length : {std::size_t{0}, std::size_t{100}, whole.size() - 1}) {
    write_file(cut, std::string_view(whole).substr(0, length));
    EXPECT_THAT(error_of_opening(path), HasSubstr("model_weight_pp-rank-1-of-2_tp-rank-1-of-2")) << length;
  }
}

// nanotron writes shapes as Python prints them, so that numbers from NumPy 2 have its type around them.
TEST_F(Nanotron, NumbersOfNumPyAreRead) {
  const std::string path = copy("tp2");
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(path)) {
    if (entry.path().extension() != ".safetensors") continue;
    std::string bytes = read_file(entry.path());
    const std::string plain = "(128, 64)", of_numpy = "(np.int64(128), 64)";
    const std::size_t at = bytes.find(plain);
    if (at == std::string::npos) continue;
    bytes.replace(at, plain.size(), of_numpy);
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof header);
    header += of_numpy.size() - plain.size();
    std::memcpy(bytes.data(), &header, sizeof header);
    write_file(entry.path(), bytes);
  }
  const CommandResult verified = reshard_cli({"verify", path});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  EXPECT_TRUE(load_checkpoint(path) == load_checkpoint(test_data("nanotron/tp2")));
}

TEST_F(Nanotron, FilesAreKnownByTheirNames) {
  const auto text = [](std::string_view name) {
    const auto n = nanotron::parse_file_name(name);
    if (!n) return std::string("none");
    return n->parameter + " " + std::to_string(n->stage) + "/" + std::to_string(n->stages) + " " +
           std::to_string(n->rank) + "/" + std::to_string(n->ranks) + " " + std::to_string(n->experts);
  };
  EXPECT_EQ(text("model_weight.safetensors"), "weight 0/1 0/0 1");
  EXPECT_EQ(text("model_weight_pp-rank-1-of-2_tp-rank-3-of-4.safetensors"), "weight 1/2 3/4 1");
  EXPECT_EQ(text("model_model_weight.safetensors_pp-rank-1-of-2_tp-rank-3-of-4.safetensors"), "weight 1/2 3/4 1");
  EXPECT_EQ(text("model_bias_pp-rank-0-of-1_tp-rank-0-of-2_exp-rank-1-of-8.safetensors"), "bias 0/1 0/2 8");
  for (const char* other :
       {"model_weight", "weight.safetensors", "model_.safetensors",
        "model_weight_pp-rank-2-of-2_tp-rank-0-of-2.safetensors", "model_weight_pp-rank-0-of-2.safetensors",
        "model_weight_pp-rank-0-of-1_tp-rank-0-of-99999999999.safetensors"})
    EXPECT_EQ(text(other), "none") << other;
}

}  // namespace
}  // namespace reshard::nanotron_test
