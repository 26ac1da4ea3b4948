// Tests written Orbax checkpoints with our own reader; tests/interop reads them with orbax-checkpoint.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "formats/orbax/orbax.h"
#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::orbax_target_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

class OrbaxTarget : public testing::Test {
 protected:
  std::string convert(const std::string& from, const std::string& name, std::vector<std::string> options) {
    const std::string out = dir_ / name;
    std::vector<std::string> args = {"convert", from, out, "-q", "--force", "--family", "none", "--to"};
    args.insert(args.end(), options.begin(), options.end());
    const CommandResult r = reshard_cli(args);
    EXPECT_EQ(r.exit_code, 0) << from << ": " << r.err;
    return out;
  }
  // Writes these tensors, cut along dimension `dim` by `tp` ranks if they have that many dimensions.
  void write(const TensorValues& values, const std::string& path, int dim, Index tp, Index max_file_bytes = 1 << 30) {
    LayoutRequest request;
    request.mesh = Mesh({{"tp", tp}});
    request.max_file_bytes = max_file_bytes;
    for (const auto& [name, value] : values) {
      TargetTensor t{name, value.dtype, value.shape, {name}, {}};
      if (value.shape.rank() > dim) t.placement = Placement{{{{"tp"}, dim}}};
      request.tensors.push_back(std::move(t));
    }
    const auto target = kOrbaxFormat.lay_out(std::move(request));
    ASSERT_TRUE(target) << target.error().message();
    write_target(values, **target, path);
  }
  // Returns the members of a JSON file.
  static Json json(const std::string& path) { return *parse_json(read_file(path), path); }

  const TempDir dir_;
};

TensorValue zeros(DType dtype, const Dims& shape) {
  return {dtype, shape, std::string(static_cast<std::size_t>(volume(shape) * byte_size(dtype)), '\0')};
}

// Every real save is converted to Orbax, from there to DCP and back, and to Hugging Face.
TEST_F(OrbaxTarget, RoundTripsKeepEveryBit) {
  const std::string meshes[] = {"dp_shard=1", "dp_shard=3", "dp_shard=2,tp=4"};
  std::size_t next = 0;
  for (const std::string name :
       sampled({"zarr2", "zarr3", "raw", "manager", "v1", "two_processes", "tensorstore"}, 3)) {
    const std::string source = test_data("orbax/" + name) + (name == "manager" ? "/5" : "");
    const auto wanted = read_digests(test_data("orbax/" + name) + ".json");
    const std::string mesh = meshes[next++ % std::size(meshes)];
    SCOPED_TRACE(name + " " + mesh);
    const std::string first = convert(source, "a", {"orbax", "--mesh", mesh});
    EXPECT_EQ(digests_of(load_checkpoint(first)), wanted);
    const std::string again = convert(convert(first, "b", {"dcp", "--mesh", "dp_shard=2"}), "c", {"orbax"});
    EXPECT_EQ(digests_of(load_checkpoint(again)), wanted);
    EXPECT_EQ(digests_of(load_checkpoint(convert(again, "d", {"hf"}))), wanted);
  }
}

// The database is sorted by bytes, in which letters beyond ASCII come after the '/' of an array's keys.
TEST_F(OrbaxTarget, NamesThatContinueOthersWithAnyCharacterAreWritten) {
  TensorValues values;
  for (const std::string name : {"", "w", "w!", "w-1", "w.b", "w0", "w~", "w\u00e9", "w\U0001f600", "\u00fc"})
    values[name] = {DType::kUint8, {3}, "abc"};
  write_dcp(values, dir_ / "dcp", Mesh({{"dp_shard", 1}}));
  for (const char* form : {"orbax", "orbax-zarr2"})
    EXPECT_EQ(load_checkpoint(convert(dir_ / "dcp", form, {form})), values);
}

// The same of compressed chunks and of zarr 2, also by several ranks, whose chunks come in any order.
TEST_F(OrbaxTarget, EveryFormKeepsEveryBit) {
  const std::vector<std::string> forms[] = {
      {"orbax", "--codec", "zstd:1"}, {"orbax-zarr2"}, {"orbax-zarr2", "--codec", "zstd:9"}};
  for (const std::string name : {"zarr3", "tensorstore"})
    for (const std::vector<std::string>& form : forms)
      for (const std::string mesh : {"dp_shard=3", "dp_shard=2,tp=4"}) {
        SCOPED_TRACE(name + " " + form.front() + " " + form.back() + " " + mesh);
        std::vector<std::string> options = form;
        options.insert(options.end(), {"--mesh", mesh, "--max-shard-size", "2KB"});
        const std::string out = convert(test_data("orbax/" + name), "out", options);
        EXPECT_EQ(digests_of(load_checkpoint(out)), read_digests(test_data("orbax/" + name) + ".json"));
        EXPECT_EQ(reshard_cli({"verify", out, "--fail-on", "warning"}).exit_code, 0);
      }
}

// Chunks of 4 MiB, filled row by row where a tensor is transposed or joined, and padded ones.
TEST_F(OrbaxTarget, CompressedChunksAreFilledInAnyOrder) {
  TensorValues values;
  for (const Dims& shape : {Dims{3000, 1500}, Dims{5}, Dims{}, Dims{0, 3}, Dims{7, 1100, 600}}) {
    TensorValue value = zeros(DType::kFloat32, shape);
    for (std::size_t i = 0; i < value.bytes.size(); ++i) value.bytes[i] = static_cast<char>(i * i >> 9);
    values["t" + std::to_string(values.size())] = value;
  }
  const std::string source = dir_ / "source";
  write(values, source, 1, 4);  // columns
  for (const std::string mesh : {"dp_shard=1", "dp_shard=3"}) {
    const std::string out = convert(source, "out", {"orbax", "--codec", "zstd:3", "--mesh", mesh});
    EXPECT_EQ(load_checkpoint(out), values);
    EXPECT_LT(fs::file_size(out + "/ocdbt.process_0/d/00000000000000000000000000000001"), 20'000'000);
    // A frame has a checksum of its own, so that a flipped byte is found.
    std::string data = read_file(out + "/ocdbt.process_0/d/00000000000000000000000000000001");
    data[data.size() / 2] ^= 1;
    write_file(out + "/ocdbt.process_0/d/00000000000000000000000000000001", data);
    EXPECT_EQ(reshard_cli({"verify", out, "--values"}).exit_code, 1);
  }
}

TEST_F(OrbaxTarget, KeepsTheObjectsOfATrainingState) {
  const std::string source = sample("fsdp2_tp2_optim") + "/checkpoint";
  const std::string out = convert(source, "out", {"orbax", "--mesh", "dp_shard=2,tp=2"});
  const CommandResult r = reshard_cli({"diff", source, convert(out, "dcp", {"dcp"})});
  EXPECT_EQ(r.exit_code, 0) << r.out;
  EXPECT_EQ(reshard_cli({"diff", source, out}).exit_code, 0);
  EXPECT_EQ(json(out + "/_strings.json").get_string("train_state.note").value(), "hello");
  const Json metadata = json(out + "/_METADATA");
  const Json* const leaf = metadata.find("tree_metadata")->find("('train_state', 'note')");
  ASSERT_TRUE(leaf);
  EXPECT_EQ(leaf->find("value_metadata")->get_string("value_type").value(), "string");
}

// Random keys, strings and empty values are leaves of the tree, also after a way through another format.
TEST_F(OrbaxTarget, KeepsLeavesWithoutArrays) {
  const std::string source = test_data("orbax/zarr3");
  const std::string first = convert(source, "first", {"orbax"});
  const std::string second = convert(convert(first, "dcp", {"dcp"}), "second", {"orbax", "--mesh", "dp_shard=2"});
  const Json wanted = json(source + "/_METADATA");
  for (const std::string& out : {first, second}) {
    const CommandResult r = reshard_cli({"diff", source, out});
    EXPECT_EQ(r.exit_code, 0) << out << r.out;
    const Json metadata = json(out + "/_METADATA");
    const Json& leaves = *metadata.find("tree_metadata");
    EXPECT_EQ(leaves.size(), wanted.find("tree_metadata")->size());
    for (const char* leaf : {"('nothing',)", "('empty',)", "('name',)"}) {
      const Json* const got = leaves.find(leaf);
      ASSERT_TRUE(got) << leaf;
      EXPECT_EQ(to_text(*got), to_text(*wanted.find("tree_metadata")->find(leaf)));
    }
    EXPECT_THAT(read_file(out + "/array_metadatas/process_0"), HasSubstr(R"({"random_key_impl":"threefry2x32"})"));
    EXPECT_TRUE(json(out + "/_sharding").contains("cm5n"));  // "rng" in base64
    const CommandResult inspected = reshard_cli({"inspect", out});
    EXPECT_THAT(inspected.out, AllOf(HasSubstr("empty = {}"), HasSubstr("nothing = None"), HasSubstr("threefry2x32")));
    EXPECT_THAT(inspected.out, testing::Not(HasSubstr("written for other files")));
  }
}

TEST_F(OrbaxTarget, ResumesAndReplacesItsOwn) {
  const std::string source = sample("tp8") + "/checkpoint", out = convert(source, "out", {"orbax"});
  dir_.write("out/foreign.txt", "mine");
  EXPECT_NE(reshard_cli({"convert", source, out, "--to", "orbax", "--force", "-q"}).exit_code, 0);
  fs::remove(out + "/foreign.txt");
  fs::remove(out + "/reshard_manifest.json");
  EXPECT_EQ(reshard_cli({"convert", source, out, "--to", "orbax", "--force", "-q"}).exit_code, 0);
  EXPECT_EQ(reshard_cli({"verify", source, "--against", out}).exit_code, 0);
}

// Shapes that the ranks do not divide, in each dimension.
TEST_F(OrbaxTarget, CutsAreWhatChunksCanExpress) {
  TensorValues values;
  unsigned char next = 0;
  for (const Dims& shape : {Dims{}, Dims{7}, Dims{8}, Dims{1}, Dims{5, 6}, Dims{6, 7}, Dims{3, 4, 5}, Dims{2, 1, 9},
                            Dims{0}, Dims{4, 0}, Dims{11, 13, 2}}) {
    TensorValue value = zeros(DType::kInt16, shape);
    for (char& c : value.bytes) c = static_cast<char>(++next);
    values.emplace("t" + std::to_string(values.size()), std::move(value));
  }
  for (int dim = 0; dim < 3; ++dim)
    for (const Index tp : sampled({1, 2, 3, 4, 16}, 3)) {
      const std::string path = dir_ / ("p" + std::to_string(dim) + "_" + std::to_string(tp));
      write(values, path, dim, tp, 64);
      EXPECT_EQ(load_checkpoint(path), values) << dim << " " << tp;
      const CommandResult r = reshard_cli({"verify", path});
      EXPECT_EQ(r.exit_code, 0) << r.out;
    }
}

TEST_F(OrbaxTarget, AChunkIsAtMost32MiB) {
  TensorValues values;
  values.emplace("rows", zeros(DType::kInt8, {(80 << 20) / 1000, 1000}));
  values.emplace("row", zeros(DType::kInt8, {1, 70 << 20}));
  write(values, dir_ / "out", 0, 1);
  EXPECT_EQ(load_checkpoint(dir_ / "out"), values);
  const auto reader = open_with(kOrbaxFormat, dir_ / "out");
  ASSERT_TRUE(reader);
  for (const Tensor& t : (*reader)->catalog().tensors()) {
    EXPECT_GE(t.fragments.size(), 3U) << t.name;
    for (std::size_t i = 0; i < t.fragments.size(); ++i) EXPECT_LE(t.fragments.extent(i).length, 32 << 20);
  }
}

// 5,000 arrays take several nodes. The keys of 40 chunks are sorted as texts, not by number.
TEST_F(OrbaxTarget, ManyKeysMakeATreeOfNodes) {
  TensorValues values;
  for (int i = 0; i < 5000; ++i) values.emplace("layers." + std::to_string(i) + ".scale", zeros(DType::kBool, {}));
  values.emplace("layers", zeros(DType::kInt8, {40, 40}));  // a name that is also the beginning of others
  values.emplace("layers-", zeros(DType::kInt8, {2}));      // sorts before the slash
  values.emplace("layers0", zeros(DType::kInt8, {2}));      // sorts after the slash
  for (std::size_t i = 0; i < values["layers"].bytes.size(); ++i) values["layers"].bytes[i] = static_cast<char>(i);
  write(values, dir_ / "out", 0, 40);
  EXPECT_GT(fs::file_size(dir_ / "out/d/00000000000000000000000000000001"), std::uintmax_t{1} << 20);
  EXPECT_EQ(load_checkpoint(dir_ / "out"), values);
}

TEST_F(OrbaxTarget, NamesBecomeATreeUnlessTheyCannot) {
  const auto keys = [&](const TensorValues& values) {
    write(values, dir_ / "out", 0, 1);
    std::vector<std::string> out;
    const Json metadata = json(dir_ / "out/_METADATA");
    const std::span<const Json::Member> leaves = *metadata.get_object("tree_metadata");
    for (const Json::Member& leaf : leaves) out.push_back(leaf.key);
    fs::remove_all(dir_ / "out");
    return out;
  };
  const TensorValue w = zeros(DType::kInt8, {2});
  EXPECT_THAT(keys({{"a.b", w}, {"a.it's", w}, {"c", w}}),
              testing::ElementsAre("('a', 'b')", "('a', \"it's\")", "('c',)"));
  EXPECT_THAT(keys({{"a", w}, {"a.b", w}}), testing::UnorderedElementsAre("('a',)", "('a.b',)"));
}

TEST_F(OrbaxTarget, SaysWhatItCannotStore) {
  const auto error = [](std::vector<TargetTensor> tensors) {
    LayoutRequest request;
    request.tensors = std::move(tensors);
    const auto target = kOrbaxFormat.lay_out(std::move(request));
    return target ? "" : target.error().message();
  };
  // --dtype converts neither.
  EXPECT_THAT(error({{"w", DType::kComplex32, {2}, {"w"}, {}}}),
              AllOf(HasSubstr("'w'"), HasSubstr("complex32"), HasSubstr("--exclude")));
  EXPECT_THAT(error({{"w", DType::kFloat4E2M1x2, {2}, {"w"}, {}}}),
              AllOf(HasSubstr("float4_e2m1fn_x2"), HasSubstr("--exclude")));
  EXPECT_THAT(error({{"a", DType::kInt8, {2}, {"a"}, {}}, {"a/c", DType::kInt8, {2}, {"a/c"}, {}}}),
              AllOf(HasSubstr("'a/c'"), HasSubstr("--rename")));
  EXPECT_THAT(error({{std::string(70'000, 'n'), DType::kInt8, {2}, {"n"}, {}}}), HasSubstr("65535 bytes"));
}

TEST_F(OrbaxTarget, NamesTheMeshOfEachArray) {
  const std::string out = convert(sample("tp8") + "/checkpoint", "out", {"orbax", "--mesh", "dp_shard=2,tp=2"});
  EXPECT_THAT(reshard_cli({"inspect", out}).out, HasSubstr("from a mesh of dp_shard=2, tp=2"));
  const Json shardings = json(out + "/_sharding");
  const std::string name = "bm9ybS53ZWlnaHQ=";  // "norm.weight" in base64
  EXPECT_EQ(shardings.get_string(name).value(),
            R"({"sharding_type":"NamedSharding","shape":[2,2],"axis_names":["dp_shard","tp"],)"
            R"("axis_types":["AxisType.Auto","AxisType.Auto"],"partition_spec":["dp_shard"]})");
}

TEST_F(OrbaxTarget, DamagedObjectsAreNamed) {
  const std::string out = convert(sample("fsdp2_tp2_optim") + "/checkpoint", "out", {"orbax"});
  const std::string list = out + "/_reshard_objects.json", text = read_file(list);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    write_file(list, changed.replace(changed.find(from), from.size(), to));
    return error_of_opening(out);
  };
  EXPECT_THAT(with("\"offset\":0", "\"offset\":99999999"), HasSubstr("_reshard_objects.json"));
  EXPECT_THAT(with("\"offset\":0", "\"offset\":-1"), HasSubstr("_reshard_objects.json"));
  EXPECT_THAT(with("\"path\":", "\"path\":7,\"x\":"), HasSubstr("_reshard_objects.json"));
  EXPECT_THAT(with("\"objects\"", "\"others\""), HasSubstr("_reshard_objects.json"));
}

}  // namespace
}  // namespace reshard::orbax_target_test
