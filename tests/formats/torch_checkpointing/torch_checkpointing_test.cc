#include "formats/torch_checkpointing/torch_checkpointing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "formats/encoding/pickle_writer.h"
#include "formats/open.h"
#include "formats/torch_checkpointing/metadata.h"
#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::torch_checkpointing_test {
namespace {

namespace fs = std::filesystem;
using testing::Contains;
using testing::HasSubstr;

// Saves of torch_checkpointing 0.1.1 by two ranks of FSDP2: with optimizer and other items in torch.save, and of the
// model alone in safetensors.
const std::string kTorch = "torch_checkpointing/fsdp2", kSafetensors = "torch_checkpointing/fsdp2-safetensors";

class TorchCheckpointing : public testing::Test {
 protected:
  // Returns the step in a copy.
  std::string copy(const std::string& name, const std::string& step = "step-2") {
    const std::string path = dir_ / step;
    fs::remove_all(path);
    fs::copy(test_data(name) + "/step-2", path, fs::copy_options::recursive);
    return path;
  }
  const TempDir dir_;
};

TEST_F(TorchCheckpointing, BecomesTheModel) {
  for (const std::string& name : {kTorch, kSafetensors}) {
    const std::string out = dir_ / base_name(name), config = test_data(name) + "/config.json";
    for (const std::string path : {"/step-2", "/step-2/metadata.pkl"}) {
      const CommandResult r =
          reshard_cli({"convert", test_data(name) + path, out, "--to", "hf", "--config", config, "-q", "--force"});
      ASSERT_EQ(r.exit_code, 0) << r.err;
      EXPECT_EQ(digests_of(load_checkpoint(out)), read_digests(test_data(name) + ".hf.json")) << name;
    }
    const CommandResult verified =
        reshard_cli({"verify", test_data(name) + "/step-2", "--config", config, "--fail-on", "warning"});
    EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  }
}

// The library still loads version 1.0, in which the tensors of all items are side by side. This is the same save; the
// library finds it equal to its own of version 2.0.
TEST_F(TorchCheckpointing, MetadataOfVersion1AreRead) {
  const std::string path = copy(kSafetensors), config = test_data(kSafetensors) + "/config.json";
  fs::copy(test_data(kSafetensors) + "/metadata-1.0.pkl", path + "/metadata.pkl", fs::copy_options::overwrite_existing);
  const CommandResult r = reshard_cli({"convert", path, dir_ / "hf", "--to", "hf", "--config", config, "-q"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "hf")), read_digests(test_data(kSafetensors) + ".hf.json"));
  const CommandResult verified = reshard_cli({"verify", path, "--config", config, "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

TEST_F(TorchCheckpointing, OptimizerAndOtherItemsAreRead) {
  std::map<std::string, std::string> moments;
  constexpr std::string_view kState = "optimizer.state.";
  for (const auto& [name, digest] : digests_of(load_checkpoint(test_data(kTorch) + "/step-2"))) {
    if (!name.starts_with(kState) || name.ends_with(".step")) continue;
    const std::size_t dot = name.rfind('.');
    moments[name.substr(dot + 1) + "." + name.substr(kState.size(), dot - kState.size())] = digest;
  }
  auto expected = read_digests(test_data(kTorch) + ".optim.json");
  std::erase_if(expected, [](const auto& e) { return e.first.starts_with("step."); });
  EXPECT_EQ(moments, expected);
  const auto open = open_checkpoint(test_data(kTorch) + "/step-2");
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_EQ(open->format, &kTorchCheckpointingFormat);
  const Catalog& catalog = open->reader->catalog();
  EXPECT_EQ(catalog.stale_files, std::vector<std::string>());
  EXPECT_EQ(catalog.warnings, std::vector<std::string>());
  std::vector<std::string> objects;
  for (const Blob& b : catalog.blobs) objects.push_back(b.name + " = " + open->reader->describe(b));
  EXPECT_THAT(objects, Contains("optimizer.param_groups.norm.weight.betas = (0.9, 0.999)"));
  EXPECT_THAT(objects, Contains(testing::StartsWith("lr_scheduler.")));
  EXPECT_THAT(objects, Contains(testing::StartsWith("train_state.")));
  // Optimizer state follows its parameters.
  const std::string out = dir_ / "dcp";
  const CommandResult r = reshard_cli({"convert", test_data(kTorch) + "/step-2", out, "--to", "dcp", "--mesh",
                                       "dp_shard=3", "--config", test_data(kTorch) + "/config.json", "-q"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(load_checkpoint(out), load_checkpoint(test_data(kTorch) + "/step-2"));
}

TEST_F(TorchCheckpointing, SavesThatDidNotFinishAreToldApart) {
  // The save was killed before the rename.
  std::string path = copy(kTorch, "tmp_step-2");
  EXPECT_EQ(
      error_of_opening(path),
      "D: a save that did not finish: torch_checkpointing renames it to 'step-2' when every rank has written. Take "
      "an earlier step");
  fs::remove(path + "/metadata.pkl");
  fs::remove(path + "/model_1.pt");
  write_file(path + "/optimizer_1.pt", "");
  EXPECT_EQ(error_of_opening(path),
            "D: a save that did not finish: torch_checkpointing renames it to 'step-2' when every rank has written; "
            "missing: 2 files: 'metadata.pkl', 'model_1.pt'; empty, as after a failed write: 1 file: "
            "'optimizer_1.pt'. Take an earlier step");
  EXPECT_THAT(error_of_opening(dir_ / "."), HasSubstr("none of them complete"));
  // Without a temporary directory rank 0 writes metadata.pkl first, so it does not prove that the save is complete.
  path = copy(kTorch);
  fs::remove(path + "/optimizer_1.pt");
  EXPECT_EQ(error_of_opening(path),
            "D/optimizer_1.pt: cannot open: No such file or directory. reshard verify lists what the other files have; "
            "restore it from another copy of the checkpoint");
  write_file(path + "/optimizer_1.pt", "");
  fs::remove(path + "/model_0.pt");
  EXPECT_THAT(error_of_opening(path),
              testing::AllOf(HasSubstr("2 files cannot be read:\n"), HasSubstr("/optimizer_1.pt"),
                             HasSubstr("/model_0.pt: cannot open: No such file")));
  path = copy(kSafetensors);
  fs::remove(path + "/metadata.pkl");
  EXPECT_THAT(error_of_opening(path), HasSubstr("D: a save without metadata.pkl, which describes its tensors"));
}

TEST_F(TorchCheckpointing, DamagedFilesAreRefused) {
  for (const std::string& name : {kTorch, kSafetensors}) {
    const std::string path = copy(name);
    for (const auto& [file, bytes] : all_files(path)) {
      if (file.ends_with(".json") || file.starts_with("train_state") || file.starts_with("lr_")) continue;
      for (const std::size_t length : {std::size_t{1}, bytes.size() / 3, bytes.size() - 1}) {
        write_file(path + "/" + file, std::string_view(bytes).substr(0, length));
        EXPECT_NE(error_of_opening(path), "") << file << " " << length;
      }
      write_file(path + "/" + file, bytes);
    }
    EXPECT_EQ(error_of_opening(path), "");
  }
  // Another rank's file: torch.save records its position, safetensors its shape.
  std::string path = copy(kTorch);
  fs::copy(path + "/model_0.pt", path + "/model_1.pt", fs::copy_options::overwrite_existing);
  EXPECT_THAT(error_of_opening(path), HasSubstr("D/model_1.pt: tensor '"));
  path = copy(kSafetensors);
  fs::copy(path + "/model_0.safetensors", path + "/model_1.safetensors", fs::copy_options::overwrite_existing);
  EXPECT_THAT(error_of_opening(path), HasSubstr("as metadata.pkl has it, got float32"));
}

// Returns a metadata.pkl of one tensor, [6], cut over two ranks.
std::string metadata(const std::string& version, Index ranks, std::vector<Index> mesh, const std::string& placement,
                     const std::string& file = "") {
  pickle::PickleWriter w;
  const auto dict = [&](auto&& members) {
    w.empty_dict();
    w.mark();
    members();
    w.set_items();
  };
  const auto list_of = [&](auto&& item) {
    w.empty_list();
    w.mark();
    item();
    w.append_items();
  };
  const std::vector<Index> shape = {6}, sizes = {static_cast<Index>(mesh.size())};
  const auto data = [&] {
    w.text("global_shape");
    w.integers(shape);
    w.text("dtype");
    w.text("torch.uint8");
    w.text("mesh_spec");
    dict([&] {
      w.text("mesh_shape");
      w.integers(sizes);
      w.text("mesh_data");
      w.integers(mesh);
    });
    w.text("placements");
    list_of([&] {
      dict([&] {
        w.text("type");
        w.text(placement);
        w.text("dim");
        w.integer(0);
      });
    });
  };
  const auto holding = [&] {
    w.text("sharding_metadata");
    dict([&] {
      w.text("type");
      w.text("DTensorShardingMetadata");
      w.text("data");
      dict(data);
    });
  };
  const auto item = [&] {
    w.text("nested_path_to_metadata");
    dict([&] {
      w.text("[\"layers\",0,\"w\"]");
      list_of([&] { dict(holding); });
    });
    w.text("rank_to_layout_info");
    dict([&] {
      for (Index rank = 0; rank < ranks; ++rank) {
        w.integer(rank);
        if (file.empty()) {
          w.none();
          continue;
        }
        dict([&] {
          w.text("file_path");
          w.text(file);
        });
      }
    });
  };
  dict([&] {
    w.text("metadata");
    dict([&] {
      w.text("model");
      dict(item);
    });
    w.text("world_size");
    w.integer(2);
    w.text("version");
    w.text(version);
  });
  return std::move(w).finish();
}

TEST_F(TorchCheckpointing, MetadataThatMakeNoSenseAreRefused) {
  using torch_checkpointing::parse_metadata;
  const auto good = parse_metadata(metadata("2.0", 2, {0, 1}, "Shard"), "m");
  ASSERT_TRUE(good) << good.error().message();
  ASSERT_EQ(good->items.at("model").tensors.size(), 1u);
  EXPECT_EQ(good->items.at("model").tensors[0].name, "layers.0.w");
  EXPECT_EQ(good->items.at("model").files, (std::vector<std::string>{"model_0.pt", "model_1.pt"}));
  const auto said = [](const std::string& bytes) {
    const auto parsed = parse_metadata(bytes, "m");
    return parsed ? "accepted" : parsed.error().message();
  };
  EXPECT_THAT(said(metadata("3.0", 2, {0, 1}, "Shard")), HasSubstr("version: expected '2.0' or '1.0', got '3.0'"));
  EXPECT_THAT(said(metadata("1.0", 2, {0, 1}, "Shard")), HasSubstr("'rank_to_layout_info_mappings': expected it"));
  EXPECT_THAT(said(metadata("2.0", 1, {0, 1}, "Shard")),
              HasSubstr("rank_to_layout_info: expected each of the 2 ranks"));
  EXPECT_THAT(said(metadata("2.0", 2, {0, 2}, "Shard")), HasSubstr("mesh_data: expected ranks of 2, each once"));
  EXPECT_THAT(said(metadata("2.0", 2, {1, 1}, "Shard")), HasSubstr("mesh_data: expected ranks of 2, each once"));
  EXPECT_THAT(said(metadata("2.0", 2, {0, 1}, "Partial")), HasSubstr("expected Shard, StridedShard or Replicate"));
  EXPECT_THAT(said(metadata("2.0", 2, {0, 1}, "StridedShard")), HasSubstr("split_factor"));
  EXPECT_THAT(said(metadata("2.0", 2, {0, 1}, "Shard", "a.pt")), HasSubstr("file 'a.pt' occurs twice"));
  EXPECT_THAT(said(metadata("2.0", 2, {0, 1}, "Shard", "../a.pt")), HasSubstr("expected a file inside the step"));
  EXPECT_THAT(said("\x80\x02}."), HasSubstr("world_size"));
  EXPECT_THAT(said("\x80\x02N."), HasSubstr("metadata: expected a dict"));
}

// step-2 is torchtitan's final save in Hugging Face format, next to the steps that it was made from.
TEST_F(TorchCheckpointing, AnExportToHuggingFaceIsReadAsThat) {
  const std::string path = dir_ / "step-2";
  ASSERT_EQ(reshard_cli({"convert", test_data(kSafetensors) + "/step-2", path, "--to", "hf", "--max-shard-size",
                         "200KB", "--config", test_data(kSafetensors) + "/config.json", "-q"})
                .exit_code,
            0);
  fs::copy(test_data(kSafetensors) + "/step-2", path + "/sharded");
  const auto open = open_checkpoint(path);
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_EQ(open->format->name, "hf");
  EXPECT_EQ(digests_of(load_checkpoint(path)), read_digests(test_data(kSafetensors) + ".hf.json"));
  EXPECT_TRUE(recognises(kTorchCheckpointingFormat, path + "/sharded"));
}

// 257 rows: 129 and 128 by tensor parallelism, each divided into three or four by FSDP. With four, torch 2.15.0's
// _compute_local_shape_and_global_offset gives rank 3 other rows than fully_shard does.
TEST_F(TorchCheckpointing, RowsThatItsLoaderWouldPlaceElsewhereAreRefused) {
  const std::string source = test_data(kSafetensors) + "/step-2", config = test_data(kSafetensors) + "/config.json";
  const std::string out = dir_ / "step-3";
  const auto write = [&](const std::string& mesh) {
    return reshard_cli(
        {"convert", source, out, "--to", "torch_checkpointing", "--mesh", mesh, "--config", config, "-q"});
  };
  const CommandResult refused = write("dp_shard=4,tp=2");
  EXPECT_EQ(refused.exit_code, 4) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("torch's loader would put some of its 257 rows elsewhere (2 and 4 ranks"));
  EXPECT_FALSE(fs::exists(out));
  const CommandResult written = write("dp_shard=3,tp=2");
  ASSERT_EQ(written.exit_code, 0) << written.err;
  EXPECT_EQ(digests_of(load_checkpoint(out)), digests_of(load_checkpoint(source)));
}

}  // namespace
}  // namespace reshard::torch_checkpointing_test
