#include "formats/fsdp/fsdp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "formats/open.h"
#include "lib/base/json.h"
#include "lib/model/config.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/sha256.h"
#include "tests/support/temp_dir.h"

namespace reshard::fsdp_test {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Key;

const std::string kData = RESHARD_TEST_DATA "/fsdp/";

std::string refusal(const std::string& path) {
  const auto open = open_checkpoint(path, {});
  return open ? "accepted" : open.error().message();
}

std::vector<std::string> object_names(const Catalog& catalog) {
  std::vector<std::string> out;
  for (const Blob& b : catalog.blobs) out.push_back(b.name);
  return out;
}

// A copy of a directory, to be damaged.
class Copy {
 public:
  explicit Copy(const std::string& name) {
    for (const auto& [file, bytes] : all_files(kData + name)) dir_.write(file, bytes);
  }
  const std::string& path() const { return dir_.path(); }
  std::string operator/(const std::string& name) const { return dir_ / name; }
  void remove(const std::string& name) const { std::filesystem::remove(dir_ / name); }
  void rename(const std::string& from, const std::string& to) const { std::filesystem::rename(dir_ / from, dir_ / to); }

 private:
  TempDir dir_;
};

TEST(Fsdp, FilesAreKnownByTheirNames) {
  const auto text = [](std::string_view name) {
    const auto parsed = fsdp::parse_file_name(name);
    if (!parsed) return std::string("none");
    return std::to_string(static_cast<int>(parsed->role)) + " '" + parsed->save + "' " + std::to_string(parsed->rank) +
           " of " + (parsed->ranks ? std::to_string(*parsed->ranks) : "?");
  };
  EXPECT_EQ(text("model_world_size_16_rank_3.pt"), "0 'world_size_16' 3 of 16");
  EXPECT_EQ(text("optim_world_size_1_rank_0.pt"), "1 'world_size_1' 0 of 1");
  EXPECT_EQ(text("extra_state_world_size_4_rank_2.pt"), "2 'world_size_4' 2 of 4");
  EXPECT_EQ(text("pytorch_model_fsdp_0_rank12.bin"), "0 '0' 12 of ?");
  EXPECT_EQ(text("pytorch_model_fsdp_rank0.bin"), "0 '' 0 of ?");
  EXPECT_EQ(text("optimizer_1_rank0.bin"), "1 '1' 0 of ?");
  for (const char* other :
       {"model_world_size_4_rank_4.pt", "model_world_size_4_rank_1.bin", "model_world_size_4_rank_.pt",
        "model_world_size_-4_rank_1.pt", "model_world_size_99999999999_rank_0.pt", "pytorch_model_fsdp.bin",
        "pytorch_model_fsdp_0_rank0.bin.bak", "pytorch_model_fsdp_x_rank0.bin", "optimizer.bin", "model.pt", ""})
    EXPECT_EQ(text(other), "none") << other;
}

// ---- Real checkpoints

class FsdpData : public testing::TestWithParam<const char*> {};

// Tests every tensor, and every moment under its parameter's name, for each way of sharding (tests/data/fsdp/make.py).
TEST_P(FsdpData, JoinsToWhatWasTrained) {
  const std::string path = kData + GetParam();
  ASSERT_EQ(*recognised_format(*PathSnapshot::look(path)), &kFsdpFormat);
  TensorValues got = load_checkpoint(path);
  std::erase_if(got, [](const auto& t) { return t.first.starts_with("extra_state."); });
  const TensorValues wanted = load_checkpoint(path + ".safetensors");
  for (const auto& [name, value] : wanted) EXPECT_TRUE(got.contains(name) && got.at(name) == value) << name;
  EXPECT_EQ(got.size(), wanted.size());
  const auto open = open_checkpoint(path, {});
  ASSERT_TRUE(open);
  const Catalog& catalog = open->reader->catalog();
  EXPECT_THAT(catalog.warnings, IsEmpty());
  EXPECT_THAT(object_names(catalog),
              AllOf(Contains("optimizer.param_groups.0.lr"), Contains("optimizer.param_groups.0.params")));
  for (const Blob& b : catalog.blobs)
    if (b.name == "optimizer.param_groups.0.params") {
      EXPECT_THAT(open->reader->describe(b), HasSubstr("'embed.weight'"));
    }
}
INSTANTIATE_TEST_SUITE_P(All, FsdpData,
                         testing::Values("fsdp2_tp2", "hsdp_tied", "fsdp2_ignored", "fsdp1_sharded", "fsdp1_hybrid",
                                         "fsdp1_orig_params", "one_rank", "accelerate_fsdp2", "accelerate_fsdp1"),
                         [](const auto& row) { return std::string(row.param); });

TEST(Fsdp, JoinsWhatTorch26Wrote) {
  const TensorValues got = load_checkpoint(kData + "fsdp2_tp2_torch26");
  const std::string path = kData + "fsdp2_tp2_torch26.digests.json";
  const Json digests = *parse_json(read_file(path), path);
  ASSERT_EQ(got.size(), digests.size());
  for (const auto& [name, value] : got) {
    const auto wanted = digests.get_array(name);
    ASSERT_TRUE(wanted) << name;
    EXPECT_EQ(info(value.dtype).safetensors_name, *(*wanted)[0].as_string()) << name;
    EXPECT_EQ(sha256_hex(value.bytes), *(*wanted)[2].as_string()) << name;
  }
}

// Equal parts of ranks are replicas; rank-specific random states are kept separately.
TEST(Fsdp, WhatRanksReplicateIsThereOnce) {
  const auto open = open_checkpoint(kData + "hsdp_tied", {});
  ASSERT_TRUE(open) << open.error().message();
  const Catalog& catalog = open->reader->catalog();
  const auto text = [&](const char* name) {
    const Tensor& t = catalog.tensors()[*catalog.find(name)];
    return std::to_string(t.fragments.size()) + " and " + std::to_string(t.replicas.size());
  };
  EXPECT_EQ(text("embed.weight"), "2 and 2");
  EXPECT_EQ(text("norm.scale"), "1 and 3");
  EXPECT_EQ(text("optimizer.state.embed.weight.step"), "1 and 3");
  EXPECT_EQ(text("extra_state.rank_3.rng.cpu"), "1 and 0");
  EXPECT_FALSE(catalog.find("extra_state.rng.cpu"));
  EXPECT_THAT(object_names(catalog),
              AllOf(Contains("extra_state.lr_scheduler.last_epoch"), Contains("extra_state.rank_2.rng.numpy")));
  // The head is the embedding under a second name, and has no moments of its own.
  EXPECT_TRUE(catalog.find("head.weight"));
  EXPECT_FALSE(catalog.find("optimizer.state.head.weight.exp_avg"));
}

// 13 rows on 3 x 2 ranks: tensor parallelism gives 7 and 6 rows, which FSDP divides into 3, 3, 1 and 2, 2, 2.
TEST(Fsdp, RowsThatDoNotDivideAreCutAsFullyShardCutsThem) {
  const auto open = open_checkpoint(kData + "fsdp2_tp2", {});
  ASSERT_TRUE(open) << open.error().message();
  const Catalog& catalog = open->reader->catalog();
  const auto boxes = [&](const char* name) {
    const Tensor& t = catalog.tensors()[*catalog.find(name)];
    std::vector<std::string> out;
    for (std::size_t i = 0; i < t.fragments.size(); ++i) out.push_back(to_string(t.fragments.box(i)));
    return out;
  };
  EXPECT_THAT(boxes("layers.0.w1"), ElementsAre("[0:2, 0:4]", "[4:5, 0:4]", "[2:4, 0:4]", "[5:6, 0:4]", "[6:7, 0:4]"));
  EXPECT_THAT(boxes("layers.0.w2"), ElementsAre("[0:2, 0:4]", "[0:2, 4:7]", "[2:4, 0:4]", "[2:4, 4:7]"));
  EXPECT_THAT(boxes("layers.0.norm"), ElementsAre("[0:2]", "[2:4]"));
}

TEST(Fsdp, ConfigAndTokenizerAreFoundInItsModelDirectory) {
  const Copy copy("fsdp2_tp2_torch26");
  write_file(copy / "huggingface/tokenizer.json", "{}");
  const auto open = open_checkpoint(copy.path(), {});
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_EQ(find_config_file(*open->reader)->path, copy / "huggingface/config.json");
  EXPECT_TRUE((*open->reader->side_file("config.json", 1 << 20)).has_value());
  EXPECT_FALSE((*open->reader->side_file("generation_config.json", 1 << 20)).has_value());

  const TempDir dir;
  const CommandResult hf = reshard_cli({"convert", copy.path(), dir / "hf", "--to", "hf"});
  ASSERT_EQ(hf.exit_code, 0) << hf.err;
  EXPECT_THAT(all_files(dir / "hf"), AllOf(Contains(Key("config.json")), Contains(Key("tokenizer.json"))));
  TensorValues got = load_checkpoint(dir / "hf");
  EXPECT_EQ(got, load_checkpoint(copy.path()));
  const CommandResult verify = reshard_cli({"verify", copy.path(), "--fail-on", "note"});
  EXPECT_EQ(verify.exit_code, 0) << verify.out << verify.err;
}

TEST(Fsdp, BecomesADcpOfAnyMesh) {
  const TempDir dir;
  for (const std::string name : {"fsdp2_tp2", "fsdp1_hybrid"}) {
    const std::string out = dir / name;
    const CommandResult r =
        reshard_cli({"convert", kData + name, out, "--to", "dcp", "--mesh", "dp_shard=2", "--family", "none"});
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_EQ(load_checkpoint(out), load_checkpoint(kData + name));
    const auto open = open_checkpoint(out, {});
    ASSERT_TRUE(open);
    EXPECT_EQ(open->reader->catalog().blobs.size(), open_checkpoint(kData + name, {})->reader->catalog().blobs.size());
  }
}

// ---- Missing and wrong files

TEST(Fsdp, AMissingFileIsNamed) {
  for (const std::string gone :
       {"model_world_size_4_rank_2.pt", "optim_world_size_4_rank_0.pt", "extra_state_world_size_4_rank_3.pt"}) {
    const Copy copy("fsdp1_hybrid");
    copy.remove(gone);
    EXPECT_THAT(refusal(copy.path()), HasSubstr("missing 1 file ('" + gone + "') of 4 ranks"));
  }
  // Accelerate's file names do not give the number of ranks, but the tensors do.
  for (const std::string name : {"accelerate_fsdp2", "accelerate_fsdp1"}) {
    const Copy copy(name);
    const std::string last = name == "accelerate_fsdp2" ? "2" : "1";
    copy.remove("pytorch_model_fsdp_0_rank" + last + ".bin");
    EXPECT_THAT(refusal(copy.path()), HasSubstr("missing 1 file ('pytorch_model_fsdp_0_rank" + last + ".bin')"));
    copy.remove("optimizer_0_rank" + last + ".bin");
    EXPECT_THAT(refusal(copy.path()),
                AllOf(HasSubstr("missing 2 files ('pytorch_model_fsdp_0_rank" + last + ".bin', 'optimizer_0_rank"),
                      HasSubstr("the tensors are of ")));
  }
}

TEST(Fsdp, FilesOfTwoSavesAreNotMixed) {
  const Copy copy("fsdp1_sharded");
  const TensorValues whole = load_checkpoint(copy.path());
  std::filesystem::copy_file(kData + "fsdp1_hybrid/model_world_size_4_rank_1.pt",
                             copy / "model_world_size_4_rank_1.pt");
  EXPECT_THAT(refusal(copy.path()), AllOf(HasSubstr("files of 2 saves: of 3 ranks; of 4 ranks, missing 3 files "
                                                    "('model_world_size_4_rank_0.pt', 'model_world_size_4_rank_2.pt', "
                                                    "'model_world_size_4_rank_3.pt')"),
                                          HasSubstr("Open one of the files by its path")));
  EXPECT_EQ(load_checkpoint(copy / "optim_world_size_3_rank_1.pt"), whole);
  // The leftover of a four-rank run is refused even if all files that the settings list are missing.
  const Copy other("fsdp1_hybrid");
  write_file(other / "fsdp_config.json", R"({"FSDP_version": 1, "world_size": 8})");
  EXPECT_THAT(refusal(other.path()), HasSubstr("expected files of 8 ranks, as fsdp_config.json gives, got those of 4"));
}

TEST(Fsdp, FilesThatWereCutShortOrExchangedAreSeen) {
  {
    const Copy copy("fsdp2_tp2");
    const std::string path = copy / "model_world_size_6_rank_4.pt";
    const std::string bytes = read_file(path);
    write_file(path, bytes.substr(0, bytes.size() - 100));
    EXPECT_THAT(refusal(copy.path()), HasSubstr("model_world_size_6_rank_4.pt"));
    write_file(path, "");
    EXPECT_THAT(refusal(copy.path()), HasSubstr("model_world_size_6_rank_4.pt"));
    write_file(path, read_file(copy / "model_world_size_6_rank_2.pt"));
    EXPECT_THAT(refusal(copy.path()), AllOf(HasSubstr("model_world_size_6_rank_4.pt"),
                                            HasSubstr("expected the part of rank 4, got that of rank 2")));
  }
  {  // torch 2.6 does not record the rank, so a part counts as missing
    const Copy copy("fsdp2_tp2_torch26");
    write_file(copy / "model_world_size_4_rank_1.pt", read_file(copy / "model_world_size_4_rank_0.pt"));
    EXPECT_THAT(refusal(copy.path()), HasSubstr("elements are missing"));
  }
  {  // a file of another model
    const Copy copy("fsdp2_tp2_torch26");
    write_file(copy / "model_world_size_4_rank_1.pt", read_file(kData + "fsdp1_hybrid/model_world_size_4_rank_1.pt"));
    EXPECT_NE(refusal(copy.path()), "accepted");
  }
}

// One rank's file under a name that tells nothing.
TEST(Fsdp, ALoneFileSaysWhatIsMissing) {
  const TempDir dir;
  const std::string path = dir.write("model.pt", read_file(kData + "fsdp2_tp2/model_world_size_6_rank_3.pt"));
  EXPECT_THAT(refusal(path),
              AllOf(HasSubstr("tensor 'embed.weight': the file contains [5:10, 0:4] of [13, 4], the part of "
                              "one rank (Shard(0) on fsdp=3)"),
                    HasSubstr("the rest is in the files of the other ranks")));
}

}  // namespace
}  // namespace reshard::fsdp_test
