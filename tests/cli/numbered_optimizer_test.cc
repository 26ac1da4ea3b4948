// Tests torch's optimizer files next to a model: they number their parameters, and the shapes of their moments must be
// the model's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/changed_values.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::numbered_optimizer_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

const std::string kData = RESHARD_TEST_DATA "/runs/numbered_optimizer/";

CommandResult verify(const std::string& path) {
  CommandResult r = reshard_cli({"verify", path, "--family", "none", "--fail-on", "warning"});
  for (std::size_t at; (at = r.out.find("\n          ")) != std::string::npos;) r.out.replace(at, 11, " ");
  return r;
}

TEST(NumberedOptimizer, OneRanksMomentsAreNotThoseOfTheModelBeside) {
  for (const char* file : {"optimizer.pt", "optimizer.bin"})
    for (const bool is_whole : {true, false}) {
      const TempDir dir;
      fs::copy(kData + "model.safetensors", dir / "model.safetensors");
      fs::copy(kData + (is_whole ? "whole.pt" : "one_of_two.pt"), dir / file);
      for (const std::string& path : {dir.path(), dir / file}) {
        const CommandResult r = verify(path);
        EXPECT_EQ(r.exit_code, is_whole ? 0 : 1) << path << r.out << r.err;
        if (is_whole) continue;
        EXPECT_THAT(r.out, HasSubstr("the moments of 3 parameters have shapes that "));
        EXPECT_THAT(r.out, HasSubstr("They are one of 2 parts"));
      }
    }
}

// The optimizer of sentence-transformers trains all modules, which are saved in directories next to the first.
TEST(NumberedOptimizer, OfSeveralModulesItIsNotComparedWithOne) {
  const TempDir dir;
  fs::copy(kData + "model.safetensors", dir / "model.safetensors");
  fs::copy(kData + "one_of_two.pt", dir / "optimizer.pt");
  write_file(dir / "modules.json", "[]");
  for (const std::string& path : {dir.path(), dir / "optimizer.pt"}) {
    const CommandResult r = verify(path);
    EXPECT_EQ(r.exit_code, 0) << path << r.out << r.err;
    EXPECT_THAT(r.out, Not(HasSubstr("the moments of")));
  }
}

TEST(NumberedOptimizer, ByItselfOrDamagedItHasNothingToBeComparedWith) {
  const TempDir dir;
  fs::copy(kData + "one_of_two.pt", dir / "optimizer.pt");
  EXPECT_EQ(verify(dir / "optimizer.pt").exit_code, 0);
  fs::copy(kData + "model.safetensors", dir / "model.safetensors");
  fs::resize_file(dir / "optimizer.pt", 1000);
  EXPECT_THAT(verify(dir.path()).out, Not(HasSubstr("the moments of")));
}

// A model that trained in part has fewer moments than parameters.
TEST(NumberedOptimizer, OfAnotherModelItSaysSo) {
  const TempDir dir;
  fs::copy(kData + "whole.pt", dir / "optimizer.pt");
  write_dcp({{"w", {DType::kFloat32, {4, 4}, std::string(64, 'w')}}}, dir / "other", Mesh({{"dp_shard", 1}}));
  ASSERT_EQ(reshard_cli({"convert", dir / "other", dir / "model", "--to", "hf", "--family", "none", "-q"}).exit_code,
            0);
  fs::copy(dir / "optimizer.pt", dir / "model/optimizer.pt");
  const CommandResult r = verify(dir / "model");
  EXPECT_EQ(r.exit_code, 1) << r.out << r.err;
  EXPECT_THAT(r.out, HasSubstr("the moments of 7 parameters have shapes that "));
}

// Makes "run": a directory with a model and an optimizer, and a config of this model type unless that is empty.
void make(const TempDir& dir, const std::string& type, const std::string& optimizer, const std::string& file) {
  fs::create_directory(dir / "run");
  fs::copy(kData + "model.safetensors", dir / "run/model.safetensors");
  fs::copy(kData + optimizer, dir / ("run/" + file));
  if (!type.empty()) dir.write("run/config.json", R"({"model_type": ")" + type + R"("})");
}

// In the model's order; first the matrices, then the vectors, as the two groups were made.
const std::vector<std::string> kNumbers = {"model.embed_tokens.weight",
                                           "model.layers.0.self_attn.q_proj.weight",
                                           "model.layers.0.self_attn.o_proj.weight",
                                           "model.layers.0.mlp.up_proj.weight",
                                           "lm_head.weight",
                                           "model.layers.0.input_layernorm.weight",
                                           "model.norm.weight"};

TEST(NumberedOptimizer, HasTheNamesOfAModelWhoseOrderIsKnown) {
  const TensorValues numbered = load_checkpoint(kData + "whole.pt");
  const TensorValues model = load_checkpoint(kData + "model.safetensors");
  for (const char* file : {"optimizer.pt", "optimizer.bin"})
    for (const std::vector<std::string>& part : {std::vector<std::string>{}, {"--part", "optimizer"}}) {
      const TempDir dir;
      make(dir, "llama", "whole.pt", file);
      const CommandResult r =
          reshard_cli({"convert", dir / "run", dir / "out", "--to", "dcp", "--family", "none", "-q"}, part);
      ASSERT_EQ(r.exit_code, 0) << r.err;
      TensorValues expected = part.empty() ? model : TensorValues();
      for (const auto& [name, value] : numbered) {
        std::string named = name;
        const std::size_t at = std::string("optimizer.state.").size();
        named.replace(at, 1, kNumbers.at(static_cast<std::size_t>(name.at(at) - '0')));
        expected[named] = value;
      }
      EXPECT_TRUE(load_checkpoint(dir / "out") == expected) << file;
      const CommandResult groups = reshard_cli({"inspect", dir / "out", "--json"});
      EXPECT_THAT(groups.out, HasSubstr("model.embed_tokens.weight"));
      EXPECT_EQ(verify(dir / "run").exit_code, 0);
      EXPECT_THAT(reshard_cli({"inspect", dir / "run"}).out, Not(HasSubstr("Not read with the model")));
      // The output for a model contains only the model.
      ASSERT_EQ(reshard_cli({"convert", dir / "run", dir / "hf", "--to", "hf", "--family", "none", "-q"}).exit_code, 0);
      EXPECT_TRUE(load_checkpoint(dir / "hf") == model);
    }
}

// torch.save stores a tied head under a name of its own, but it is one parameter with the embedding.
TEST(NumberedOptimizer, CountsATiedHeadOnce) {
  const TempDir dir;
  fs::create_directory(dir / "run");
  fs::copy(kData + "tied_model.bin", dir / "run/pytorch_model.bin");
  fs::copy(kData + "tied.pt", dir / "run/optimizer.bin");
  dir.write("run/config.json", R"({"model_type": "llama"})");
  std::vector<std::string> names = kNumbers;
  std::erase(names, "lm_head.weight");
  TensorValues expected;
  for (const auto& [name, value] : load_checkpoint(kData + "tied.pt")) {
    std::string named = name;
    const std::size_t at = std::string("optimizer.state.").size();
    named.replace(at, 1, names.at(static_cast<std::size_t>(name.at(at) - '0')));
    expected[named] = value;
  }
  ASSERT_EQ(
      reshard_cli({"convert", dir / "run", dir / "out", "--to", "dcp", "--part", "optimizer", "--family", "none", "-q"})
          .exit_code,
      0);
  EXPECT_TRUE(load_checkpoint(dir / "out") == expected);
}

TEST(NumberedOptimizer, TheConfigMayBeElsewhere) {
  const TempDir dir;
  make(dir, "llama", "whole.pt", "optimizer.pt");
  ASSERT_EQ(reshard_cli({"convert", dir / "run", dir / "beside", "--to", "dcp", "--family", "none", "-q"}).exit_code,
            0);
  fs::rename(dir / "run/config.json", dir / "config.json");
  const std::vector<std::string> config = {"--config", dir / "config.json", "--family", "none"};
  const CommandResult r = reshard_cli({"convert", dir / "run", dir / "out", "--to", "dcp", "-q"}, config);
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(load_checkpoint(dir / "out") == load_checkpoint(dir / "beside"));
  const CommandResult same = reshard_cli({"diff", dir / "run", dir / "out", "--json"}, config);
  EXPECT_EQ(same.exit_code, 0) << same.out << same.err;
}

// Unsloth saves the state of FSDP2 as Trainer's optimizer.pt, with names.
TEST(NumberedOptimizer, WithTheNamesOfTheModelItIsRead) {
  const TempDir dir;
  const std::string saved = RESHARD_TEST_DATA "/runs/accelerate_full/checkpoint/checkpoint-2";
  ASSERT_EQ(reshard_cli({"convert", saved, dir / "run", "--to", "hf", "--family", "none", "-q"}).exit_code, 0);
  fs::remove(dir / "run/reshard_manifest.json");
  fs::copy(saved + "/optimizer.bin", dir / "run/optimizer.pt");
  ASSERT_EQ(reshard_cli({"convert", dir / "run", dir / "out", "--to", "dcp", "--family", "none", "-q"}).exit_code, 0);
  EXPECT_TRUE(load_checkpoint(dir / "out") == load_checkpoint(saved));
  EXPECT_EQ(verify(dir / "run").exit_code, 0);

  fs::rename(dir / "run/optimizer.pt", dir / "optimizer.pt");
  const TempDir other;
  make(other, "llama", "whole.pt", "optimizer.pt");
  fs::copy_file(dir / "optimizer.pt", other / "run/optimizer.pt", fs::copy_options::overwrite_existing);
  EXPECT_THAT(
      reshard_cli({"inspect", other / "run", "--json"}).out,
      HasSubstr("Not read with the model: optimizer.pt, optimizer state that has other names or shapes than the "
                "model. It can be opened as a checkpoint of its own."));
}

TEST(NumberedOptimizer, WithoutAnOrderThatFitsItHasNoNamesAndANoteSaysWhy) {
  struct Case {
    std::string type, optimizer, why;
  };
  for (const auto& [type, optimizer, why] : std::vector<Case>{
           {"", "whole.pt", "the order of the model's parameters is unknown without a config.json next to it"},
           {"mixtral", "whole.pt", "the order of the model's parameters is unknown"},
           {"gpt2", "whole.pt", "the order of the model's parameters is unknown"},
           {"llama", "one_of_two.pt", "their shapes are not those of the model's parameters"}}) {
    const TempDir dir;
    make(dir, type, optimizer, "optimizer.pt");
    const CommandResult r = reshard_cli({"inspect", dir / "run", "--json"});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    EXPECT_THAT(r.out, HasSubstr("Not read with the model: optimizer.pt")) << type;
    EXPECT_THAT(r.out, HasSubstr(why)) << type;
    EXPECT_NE(reshard_cli({"convert", dir / "run", dir / "out", "--to", "dcp", "--part", "optimizer"}).exit_code, 0);
  }
}

// Returns whole.pt with the first `from` in its pickle replaced.
std::string edited(const std::string& from, const std::string& to) {
  const std::string whole = read_file(kData + "whole.pt");
  std::string pickle = pickle_of(whole);
  const std::size_t at = pickle.find(from);
  EXPECT_NE(at, std::string::npos);
  return at == std::string::npos ? whole : with_pickle(whole, pickle.replace(at, from.size(), to));
}

TEST(NumberedOptimizer, WithNumbersThatNoParameterHasItIsLeftOut) {
  const std::string last("K\6", 2), key = last + "}";
  struct Case {
    std::string optimizer, why;
  };
  for (const auto& [optimizer, why] :
       std::vector<Case>{{edited(last + "e", last + "K\7e"), "the optimizer numbers 8 parameters, and the model has 7"},
                         {edited(last + "e", "K\5e"), "its groups do not list each number once"},
                         {edited(key, std::string("K\x09}(X\4\0\0\0stepK\1u", 16) + key),
                          "no group lists parameter 9, which has a state"}}) {
    const TempDir dir;
    make(dir, "llama", "whole.pt", "optimizer.pt");
    fs::remove(dir / "run/optimizer.pt");
    write_file(dir / "run/optimizer.pt", optimizer);
    const CommandResult r = reshard_cli({"inspect", dir / "run", "--json"});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    EXPECT_THAT(r.out, HasSubstr("Not read with the model: optimizer.pt"));
    EXPECT_THAT(r.out, HasSubstr(why));
    EXPECT_EQ(reshard_cli({"convert", dir / "run", dir / "out", "--to", "hf", "--family", "none", "-q"}).exit_code, 0);
  }
}

// With two optimizers, neither is chosen.
TEST(NumberedOptimizer, OfTwoNoneIsTaken) {
  const TempDir dir;
  make(dir, "llama", "whole.pt", "optimizer.pt");
  fs::copy(kData + "whole.pt", dir / "run/optimizer.bin");
  EXPECT_THAT(reshard_cli({"inspect", dir / "run"}).out, HasSubstr("optimizer.bin, optimizer.pt"));
}

}  // namespace
}  // namespace reshard::numbered_optimizer_test
