#include "formats/orbax/orbax.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "formats/open.h"
#include "formats/orbax/ocdbt.h"
#include "formats/registry.h"
#include "lib/base/memory_limit.h"
#include "lib/base/syscalls.h"
#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/must.h"
#include "tests/support/ocdbt.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::orbax_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// Written by orbax-checkpoint and tensorstore (make.py in that directory).
const char* const kSaves[] = {"zarr2", "zarr3", "raw", "files", "manager", "v1", "two_processes", "tensorstore"};

class Orbax : public testing::Test {
 protected:
  std::string copy(const std::string& name) {
    const std::string path = dir_ / name;
    fs::copy(test_data("orbax/" + name), path, fs::copy_options::recursive);
    return path;
  }
  // Replaces the first occurrence of a text in a file.
  static void edit(const std::string& path, const std::string& from, const std::string& to) {
    std::string text = read_file(path);
    const std::size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << path;
    write_file(path, text.replace(at, from.size(), to));
  }
  const TempDir dir_;
};

// Returns the path of a checkpoint: for a CheckpointManager, of a step.
std::string place_of(const std::string& name) { return test_data("orbax/" + name) + (name == "manager" ? "/5" : ""); }

TEST_F(Orbax, EveryTensorIsWhatWasSaved) {
  for (const std::string name : kSaves) {
    EXPECT_TRUE(recognises(kOrbaxFormat, place_of(name))) << name;
    EXPECT_EQ(digests_of(load_checkpoint(place_of(name))), read_digests(test_data("orbax/" + name) + ".json")) << name;
  }
}

// T5X's: gzip, and blosc with each of its codecs and shuffles, which needs its library.
TEST_F(Orbax, ChunksOfOldLibrariesAreRead) {
  const std::string source = test_data("orbax/t5x/checkpoint_1000");
  EXPECT_TRUE(recognises(kOrbaxFormat, source));
  auto wanted = read_digests(test_data("orbax/t5x.json"));
  const bool has_blosc = ::dlopen("libblosc.so.1", RTLD_NOW | RTLD_LOCAL) != nullptr;
  const std::string out = dir_ / "out";
  std::vector<std::string> args = {"convert", source, out, "--to", "hf", "--family", "none", "-q"};
  const CommandResult all = reshard_cli(args);
  EXPECT_EQ(all.exit_code, has_blosc ? 0 : 4) << all.err;
  if (!has_blosc) {
    EXPECT_THAT(all.err, AllOf(HasSubstr("'target.blosc."), HasSubstr("Debian: libblosc1")));
    args.insert(args.end(), {"--exclude", "target.blosc.*"});
    const CommandResult others = reshard_cli(args);
    EXPECT_EQ(others.exit_code, 0) << others.err;
    std::erase_if(wanted, [](const auto& entry) { return entry.first.starts_with("target.blosc."); });
  }
  EXPECT_EQ(digests_of(load_checkpoint(out)), wanted);
}

TEST_F(Orbax, ADamagedBloscChunkIsAnError) {
  const std::string path = copy("t5x") + "/checkpoint_1000", chunk = path + "/target.blosc.lz4_1/0.0";
  const std::string whole = read_file(chunk);
  const auto error = [&](const std::string& bytes) {
    write_file(chunk, bytes);
    const CommandResult r = reshard_cli({"convert", path, dir_ / "out", "--to", "hf", "--family", "none",  //
                                         "--include", "target.blosc.lz4_1", "--threads", "1"});
    EXPECT_EQ(r.exit_code, 3) << r.out << r.err;
    return r.err;
  };
  EXPECT_THAT(error(whole.substr(0, 10)), HasSubstr("blosc: expected a header"));
  EXPECT_THAT(error(whole.substr(0, 40)), HasSubstr("and 40 are stored"));
  std::string bomb = whole;
  bomb.replace(4, 4, little_endian(std::uint32_t{1} << 31));
  EXPECT_THAT(error(bomb), HasSubstr("blosc: expected at most"));
  std::string blocks = whole;
  blocks.replace(8, 4, little_endian(std::uint32_t{1} << 31));
  EXPECT_THAT(error(blocks), HasSubstr("in blocks of 2147483648"));
}

// Levanter's and EasyDeL's: the tree is one of directories.
TEST_F(Orbax, TreesOfDirectoriesAreRead) {
  const std::string array = test_data("orbax/t5x/checkpoint_1000/target.encoder.layers_0.attention.query.kernel");
  const std::string step = dir_ / "run/step-10";
  for (const char* name :
       {"model/transformer/layers/weight", "model/embed.tokens", "training_state/opt/mu/layers/weight"}) {
    fs::create_directories(fs::path(step + "/" + name).parent_path());
    fs::copy(array, step + "/" + name, fs::copy_options::recursive);
  }
  EXPECT_FALSE(recognises(kOrbaxFormat, step));  // a directory of anything
  const auto names = [](const std::string& path) {
    std::vector<std::string> out;
    for (const auto& [name, value] : load_checkpoint(path)) out.push_back(name);
    return out;
  };
  EXPECT_THAT(names(step + "/model"), ElementsAre("embed.tokens", "transformer.layers.weight"));
  for (const char* file : {"metadata.json", "tensorstore_index.json"}) {
    write_file(step + "/" + file, "{}");
    EXPECT_THAT(names(step), ElementsAre("model.embed.tokens", "model.transformer.layers.weight",
                                         "training_state.opt.mu.layers.weight"));
    EXPECT_THAT(error_of_opening(dir_ / "run"), HasSubstr("the newest complete one is"));
    const CommandResult inspected = reshard_cli({"inspect", step});
    EXPECT_EQ(inspected.exit_code, 0) << inspected.err;
    EXPECT_THAT(inspected.out, Not(HasSubstr("Not read")));
    fs::remove(step + "/" + file);
  }
}

TEST_F(Orbax, IsAFormatLikeAnother) {
  for (const std::string name : kSaves) {
    const std::string source = place_of(name), out = dir_ / name, dcp = dir_ / (name + ".dcp");
    const CommandResult verified = reshard_cli({"verify", source, "--fail-on", "warning"});
    EXPECT_EQ(verified.exit_code, 0) << name << verified.out << verified.err;
    const CommandResult converted = reshard_cli({"convert", source, out, "--to", "hf", "--family", "none", "-q"});
    ASSERT_EQ(converted.exit_code, 0) << name << converted.err;
    EXPECT_EQ(digests_of(load_checkpoint(out)), read_digests(test_data("orbax/" + name) + ".json")) << name;
    if (name != "zarr3" && name != "tensorstore") continue;
    const CommandResult cut = reshard_cli(
        {"convert", source, dcp, "--to", "dcp", "--family", "none", "--mesh", "dp_shard=3", "--memory", "400MB", "-q"});
    ASSERT_EQ(cut.exit_code, 0) << name << cut.err;
    const CommandResult compared = reshard_cli({"diff", source, dcp});
    EXPECT_EQ(compared.exit_code, 0) << name << compared.out << compared.err;
  }
}

TEST_F(Orbax, AnItemAndItsFilesStandForIt) {
  const auto whole = load_checkpoint(place_of("manager"));
  for (const char* place : {"/5/state", "/5/state/manifest.ocdbt", "/5/state/_METADATA", "/5/_CHECKPOINT_METADATA"})
    EXPECT_EQ(load_checkpoint(test_data("orbax/manager") + place), whole) << place;
  const CommandResult run = reshard_cli({"inspect", test_data("orbax/manager")});
  EXPECT_EQ(run.exit_code, 4);
  EXPECT_THAT(run.err, HasSubstr("manager/5"));
}

TEST_F(Orbax, WhatIsNoArrayIsAnObject) {
  const CommandResult r = reshard_cli({"inspect", place_of("zarr3")});
  EXPECT_THAT(r.out, AllOf(HasSubstr("hello"), HasSubstr("a random key"), HasSubstr("from a mesh of fsdp=4, tp=2"),
                           HasSubstr("int4 are read as uint8")))
      << r.out;
  const CommandResult step = reshard_cli({"inspect", place_of("manager")});
  EXPECT_THAT(step.out, HasSubstr("tokens"));
  ASSERT_EQ(
      reshard_cli({"convert", place_of("zarr3"), dir_ / "out", "--to", "dcp", "--family", "none", "-q"}).exit_code, 0);
  const CommandResult kept = reshard_cli({"inspect", dir_ / "out"});
  EXPECT_THAT(kept.out, AllOf(HasSubstr("random_key_impl"), HasSubstr("hello"))) << kept.out;
}

// ---- Damage

TEST_F(Orbax, EveryFlippedByteOfAManifestIsFound) {
  const std::string path = copy("tensorstore");
  for (const char* name : {"/manifest.ocdbt", "/manifest.000000000000001b"}) {
    const std::string bytes = read_file(path + name);
    for (std::size_t at = 0; at < bytes.size(); ++at) {
      std::string changed = bytes;
      changed[at] = static_cast<char>(changed[at] ^ 0x10);
      write_file(path + name, changed);
      EXPECT_NE(error_of_opening(path), "") << name << " " << at;
    }
    write_file(path + name, bytes);
  }
  EXPECT_EQ(error_of_opening(path), "");
}

TEST_F(Orbax, AFlippedByteOfANodeOrAnIndexIsFound) {
  const std::string path = copy("zarr3");
  std::string node;
  for (const auto& [name, bytes] : all_files(path))
    if (name.starts_with("d/")) node = name;
  const std::string bytes = read_file(path + "/" + node);
  for (std::size_t at = 0; at < bytes.size(); at += 97) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    write_file(path + "/" + node, changed);
    EXPECT_NE(error_of_opening(path), "") << at;
  }
  write_file(path + "/" + node, bytes.substr(0, bytes.size() / 2));
  EXPECT_THAT(error_of_opening(path), HasSubstr("cut short"));
}

TEST_F(Orbax, AChunkThatIsMissingIsLostOrTheFillValue) {
  const std::string path = copy("files");
  fs::remove(path + "/params.embedding/5.0");
  EXPECT_THAT(error_of_opening(path),
              AllOf(HasSubstr("'params.embedding' [40:48, 0:8]: chunk is not stored"), HasSubstr("it was lost")));
  const CommandResult verified = reshard_cli({"verify", path});
  EXPECT_EQ(verified.exit_code, 1) << verified.err;
  EXPECT_THAT(verified.out, HasSubstr("params.embedding"));
  edit(path + "/_METADATA", "\"store_array_data_equal_to_fill_value\": true",
       "\"store_array_data_equal_to_fill_value\": false");
  TensorValues wanted = load_checkpoint(test_data("orbax/files"));
  wanted["params.embedding"].bytes.replace(40 * 32, 8 * 32, 8 * 32, '\0');
  EXPECT_EQ(load_checkpoint(path), wanted);
}

TEST_F(Orbax, AnArrayThatIsMissingIsNamed) {
  const std::string path = copy("files");
  fs::remove_all(path + "/params.f8");
  EXPECT_THAT(error_of_opening(path), AllOf(HasSubstr("1 array: 'params.f8'"), HasSubstr("it was lost")));
  edit(path + "/params.flags/.zarray", "\"zstd\"", "\"lzma\"");
  EXPECT_THAT(error_of_opening(path),
              AllOf(HasSubstr("params.flags/.zarray: codec 'lzma' is not supported; supported: ")));
}

TEST_F(Orbax, ASaveThatDidNotFinishIsNamedAsThat) {
  const std::string path = copy("two_processes");
  fs::remove(path + "/manifest.ocdbt");
  EXPECT_THAT(error_of_opening(path),
              AllOf(HasSubstr("a save that did not finish"), HasSubstr("ocdbt.process_0, ocdbt.process_1")));
  for (const char* name : {"7.orbax-checkpoint-tmp", "7.orbax-checkpoint-tmp-1700000000"}) {
    fs::copy(test_data("orbax/manager/5"), dir_ / name, fs::copy_options::recursive);
    EXPECT_THAT(error_of_opening(dir_ / name), HasSubstr("a save that did not finish"));
  }
  const std::string step = copy("manager") + "/5";
  fs::rename(step + "/state", step + "/state.orbax-checkpoint-tmp-3");
  EXPECT_THAT(error_of_opening(step), HasSubstr("a save that did not finish"));
  // A run with such a step and a good one is opened at the good one.
  fs::rename(step, dir_ / "manager/6");
  fs::copy(test_data("orbax/manager/5"), dir_ / "manager/5", fs::copy_options::recursive);
  EXPECT_THAT(error_of_opening(dir_ / "manager"), HasSubstr("the newest complete one is D/5"));
}

// Old versions of Orbax (0.5, 0.6, 0.7) do not say whether they used a database: the files do.
TEST_F(Orbax, WithoutAWordOnDatabasesFilesDecide) {
  const auto forget = [](const std::string& path, const std::string& value) {
    edit(path + "/_METADATA", "\"use_ocdbt\": " + value + ", ", "");
  };
  for (const auto& [name, value] : {std::pair{"files", "false"}, {"zarr2", "true"}, {"two_processes", "true"}}) {
    const TensorValues whole = load_checkpoint(copy(name));
    forget(dir_ / name, value);
    EXPECT_EQ(load_checkpoint(dir_ / name), whole) << name;
  }
  fs::remove(dir_ / "zarr2/manifest.ocdbt");
  fs::remove_all(dir_ / "zarr2/ocdbt.process_0");
  EXPECT_THAT(error_of_opening(dir_ / "zarr2"),
              HasSubstr("no array has a directory of its own: it was not copied whole"));
}

TEST_F(Orbax, SeveralItemsAreKeptApart) {
  const std::string step = copy("manager") + "/5";
  fs::copy(test_data("orbax/v1/state"), step + "/extra", fs::copy_options::recursive);
  const TensorValues both = load_checkpoint(step), alone = load_checkpoint(place_of("manager"));
  for (const auto& [name, value] : alone) EXPECT_EQ(both.at("state." + name), value);
  for (const auto& [name, value] : load_checkpoint(place_of("v1"))) EXPECT_EQ(both.at("extra." + name), value);
}

// Counts the unnamed files that are created while it lives.
// Such leaves are members of JSON files, next to the arrays' files.
TEST_F(Orbax, LeavesWithoutArraysLeaveNoBytesUnclaimed) {
  const std::string path = dir_ / "item";
  const auto leaf = [](const std::string& name, const std::string& type, bool is_empty) {
    return "\"('" + name + "',)\": {\"key_metadata\": [{\"key\": \"" + name +
           "\", \"key_type\": 2}], \"value_metadata\": {\"value_type\": \"" + type +
           "\", \"skip_deserialize\": " + (is_empty ? "true" : "false") + "}}";
  };
  dir_.write("item/_METADATA", "{\"tree_metadata\": {" + leaf("w", "np.ndarray", false) + ", " +
                                   leaf("n", "None", true) + ", " + leaf("s", "string", false) +
                                   R"(}, "use_ocdbt": false, "use_zarr3": true,
                                   "store_array_data_equal_to_fill_value": true, "custom_metadata": null})");
  dir_.write("item/_strings.json", R"({"s": "a text"})");
  dir_.write("item/w/zarr.json", R"({"zarr_format": 3, "node_type": "array", "shape": [4], "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}}, "fill_value": 0.0,
    "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "sharding_indexed", "configuration": {
    "chunk_shape": [4], "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}], "index_location": "end"}}]})");
  dir_.write("item/w/c/0",
             std::string(16, '\x3f') + little_endian(std::uint64_t{0}) + little_endian(std::uint64_t{16}));
  const CommandResult run = reshard_cli({"verify", path, "--family", "none"});
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
  EXPECT_THAT(run.out, HasSubstr("0 errors, 0 warnings"));
}

class UnnamedFiles {
 public:
  UnnamedFiles() : scoped_(counting()) { count_ = 0; }
  int count() const { return count_; }

 private:
  static inline int count_ = 0;
  static inline int (*open_)(const char*, int, mode_t) = nullptr;
  static Syscalls counting() {
    Syscalls out = sys();
    open_ = out.open;
    out.open = [](const char* path, int flags, mode_t mode) {
      count_ += (flags & O_TMPFILE) == O_TMPFILE;
      return open_(path, flags, mode);
    };
    return out;
  }
  const ScopedSyscalls scoped_;
};

// Arrays of more than 32 MiB are decoded once: into an unnamed file, or into memory if much is granted.
TEST_F(Orbax, LargeArraysAreDecodedOnce) {
  const std::string path = dir_ / "large";
  const Index rows = 9 << 10, columns = 1 << 10;
  write_file((fs::create_directories(path + "/w"), path + "/_METADATA"),
             R"({"use_ocdbt": false, "tree_metadata": {}})");
  write_file(path + "/w/.zarray",
             R"({"zarr_format": 2, "shape": [9216, 1024], "chunks": [9216, 1024], "dtype": "<f4", "order": "C",
                 "compressor": {"id": "zstd", "level": 1}, "filters": null, "fill_value": null})");
  // A frame of one block of 36 MiB: RLE blocks of 128 KiB each.
  std::string frame("\x28\xb5\x2f\xfd\x80", 5);
  frame += '\x38';  // a window of 128 KiB
  frame += little_endian(static_cast<std::uint32_t>(4 * rows * columns));
  const int blocks = static_cast<int>(4 * rows * columns >> 17);
  for (int i = 0; i < blocks; ++i) {
    const std::uint32_t header = (i + 1 == blocks ? 1u : 0u) | 1u << 1 | (1u << 17) << 3;
    frame += little_endian(header).substr(0, 3) + static_cast<char>(i);
  }
  write_file(path + "/w/0.0", frame);
  // No limit, hardly more than the arrays and what is resident, and more than enough.
  for (const auto& [limit, files] :
       {std::pair<Index, int>{0, 1}, {resident_bytes() + (200 << 20), 1}, {16LL << 30, 0}}) {
    const UnnamedFiles unnamed;
    limit_memory(limit);
    const TensorValues values = load_checkpoint(path);
    limit_memory(0);
    EXPECT_EQ(unnamed.count(), files) << limit;
    const std::string& bytes = values.at("w").bytes;
    ASSERT_EQ(bytes.size(), static_cast<std::size_t>(4 * rows * columns));
    for (std::size_t i = 0; i < bytes.size(); i += 1 << 15) EXPECT_EQ(bytes[i], static_cast<char>(i >> 17));
  }
  write_file(path + "/w/0.0", frame.substr(0, frame.size() - 4));
  const CommandResult r = reshard_cli({"convert", path, dir_ / "out", "--to", "hf", "--family", "none"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, AllOf(HasSubstr("'w'"), HasSubstr("zstd frame")));
}

// ---- Trees that no writer makes

class OcdbtTree : public Orbax {
 protected:
  // Opens a database whose file "d/0" is `data`.
  std::string error(const OcdbtRoot& root, std::string_view data) {
    dir_.write("x/d/0", data);
    dir_.write("x/manifest.ocdbt", ocdbt_manifest("d/0", root));
    return error_of_opening(dir_ / "x");
  }
};

const char* const kScalar =
    R"({"zarr_format": 2, "shape": [], "chunks": [], "dtype": "<i4", "order": "C", "compressor": null,
        "filters": null, "fill_value": null})";

TEST_F(OcdbtTree, OfOneLeafIsRead) {
  const std::string leaf = ocdbt_leaf({{"step/.zarray", kScalar}, {"step/0", std::string("\7\0\0\0", 4)}});
  EXPECT_EQ(error({0, 0, leaf.size(), 2}, leaf), "");
  EXPECT_EQ(load_checkpoint(dir_ / "x").at("step").bytes, std::string("\7\0\0\0", 4));
  EXPECT_THAT(error({0, 0, leaf.size(), 3}, leaf), HasSubstr("expected 3 keys, got 2"));
  EXPECT_THAT(error({1, 0, leaf.size(), 2}, leaf), HasSubstr("height: expected 1, got 0"));
  const std::string twice = ocdbt_leaf({{"step/0", ""}, {"step/0", ""}});
  EXPECT_THAT(error({0, 0, twice.size(), 2}, twice), HasSubstr("expected keys in ascending order"));
}

TEST_F(OcdbtTree, ThatGoesRoundIsRefused) {
  // A node is its own child. The heights contradict each other; if they did not, the second visit would be found.
  const OcdbtRoot self{1, 0, ocdbt_parent("d/0", {1, 0, 0, 1}).size(), 1};
  const std::string node = ocdbt_parent("d/0", {1, 0, self.length, 1});
  EXPECT_THAT(error({2, 0, node.size(), 1}, node), HasSubstr("the tree refers to it twice"));
  // 200 levels form a chain of 200 nodes.
  std::string chain = ocdbt_leaf({{"step/.zarray", kScalar}});
  OcdbtRoot last{0, 0, chain.size(), 1};
  for (int height = 0; height < 200; ++height) {
    const std::string parent = ocdbt_parent("d/0", last);
    last = {height + 1, chain.size(), parent.size(), 1};
    chain += parent;
  }
  EXPECT_EQ(error(last, chain), "");
}

// The items of a step are branches of one tree, leaves without data (None) included.
TEST(OrbaxItems, KeepTheirPaths) {
  const TempDir dir;
  const std::string source = test_data("orbax/items/1"), out = dir / "out";
  EXPECT_EQ(digests_of(load_checkpoint(source)), read_digests(test_data("orbax/items.json")));
  EXPECT_EQ(reshard_cli({"verify", source}).exit_code, 0);
  ASSERT_EQ(reshard_cli({"convert", source, out, "--to", "orbax", "--family", "none", "-q"}).exit_code, 0);
  const auto path_in = [](const std::string& checkpoint) {
    const auto open = must(open_checkpoint(checkpoint));
    const Catalog& catalog = open.reader->catalog();
    return catalog.tensors()[catalog.find("opt_state.0.mu.w").value()].path;
  };
  EXPECT_EQ(path_in(out), (KeyPath{"opt_state", Index{0}, "mu", "w"}));
  EXPECT_EQ(path_in(out), path_in(source));
}

TEST_F(OcdbtTree, NamesNoFileOutsideOfTheCheckpoint) {
  const auto error = [&](const char* path) {
    dir_.write("x/manifest.ocdbt", ocdbt_manifest(path, {0, 0, 10, 1}));
    return error_of_opening(dir_ / "x");
  };
  for (const char* path : {"/etc/passwd", "../secret", "d/../../x"})
    EXPECT_THAT(error(path), HasSubstr("is no path below the checkpoint's directory")) << path;
  EXPECT_THAT(error(""), HasSubstr("its root is nowhere"));  // the path of an empty tree, as tests/data/levanter has it
}

TEST_F(OcdbtTree, OfABombEndsInAnErrorWithinTheMemoryGranted) {
  // A frame of 64 GiB of zeros: half a million blocks of 128 KiB.
  std::string frame("\x28\xb5\x2f\xfd\0\x38", 6);
  for (int i = 0; i < 1 << 19; ++i)
    frame += little_endian(std::uint32_t{1u << 1 | (1u << 17) << 3}).substr(0, 3) + '\0';
  const std::string node = ocdbt_object(kOcdbtNode, frame, 1);
  EXPECT_THAT(error({0, 0, node.size(), 1}, node), HasSubstr("zstd frame: expected at most"));
  const CommandResult r = reshard_cli({"inspect", dir_ / "x", "--memory", "150MB"});
  EXPECT_NE(r.exit_code, 0);
}

}  // namespace
}  // namespace reshard::orbax_test
