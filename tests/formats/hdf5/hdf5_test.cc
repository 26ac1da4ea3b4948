// Tests the HDF5 archive and view through the whole engine: round trips, and damage reported by name.
#include "formats/hdf5/hdf5.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <stdexcept>
#include <thread>

#include "formats/encoding/key_path.h"
#include "formats/hdf5/memory_driver.h"
#include "formats/hdf5/names.h"
#include "formats/hdf5/scan.h"
#include "formats/open.h"
#include "lib/convert/conversion.h"
#include "tests/support/checkpoints.h"
#include "tests/support/golden.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::hdf5_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr DType kAllTypes[] = {DType::kBool,      DType::kUint8,      DType::kInt8,       DType::kUint16,
                               DType::kInt16,     DType::kUint32,     DType::kInt32,      DType::kUint64,
                               DType::kInt64,     DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFloat8E4M3Fnuz,
                               DType::kFloat16,   DType::kBFloat16,   DType::kFloat8E8M0, DType::kFloat8E5M2Fnuz,
                               DType::kFloat32,   DType::kFloat64,    DType::kComplex32,  DType::kComplex64,
                               DType::kComplex128};

TensorValue value(DType dtype, const Dims& shape, unsigned seed, int kinds = 7) {
  std::mt19937 rng(seed);
  TensorValue v{dtype, shape, std::string(static_cast<std::size_t>(volume(shape) * byte_size(dtype)), '\0')};
  for (char& c : v.bytes)
    c = static_cast<char>(dtype == DType::kBool ? rng() % 2 : rng() % static_cast<unsigned>(kinds));
  return v;
}

// Returns tensors with names that are not paths, shapes of every rank, many chunks, and data that does not compress.
TensorValues odd_tensors() {
  TensorValues t;
  unsigned seed = 1;
  for (const DType dtype : kAllTypes)
    if (info(dtype).torch_name != "complex32")
      t["types." + std::string(info(dtype).torch_name)] = value(dtype, {3, 5}, seed++);
  t["a"] = value(DType::kFloat32, {2}, seed++);
  t["a.b"] = value(DType::kFloat32, {3}, seed++);
  t["..x/y."] = value(DType::kInt16, {4}, seed++);
  t["reshard.files.z"] = value(DType::kInt8, {4}, seed++);
  t[""] = value(DType::kFloat32, {1}, seed++);
  t["scalar"] = value(DType::kFloat64, {}, seed++);
  t["empty"] = value(DType::kFloat32, {0, 7}, seed++);
  t["rows"] = value(DType::kBFloat16, {1500, 1000}, seed++);
  t["noise"] = value(DType::kFloat32, {700, 600}, seed++, 256);
  t["experts"] = value(DType::kBFloat16, {3, 900, 1000}, seed++);
  t["long"] = value(DType::kUint8, {2'500'001}, seed++);
  return t;
}

Status to(const std::string& format, const std::string& from, const std::string& destination,
          Compression compression = {}, bool replace = false, int threads = 2) {
  OpenCheckpoint open = TRY(open_checkpoint(from));
  ConversionOptions o;
  o.source_path = from;
  o.model.detect = false;
  o.naming.keep_names = true;
  o.compression = compression;
  o.run.threads = threads;
  o.run.memory = Index{1} << 30;
  const Format& target = *TRY(find_format(format));
  const auto conversion = TRY(Conversion::prepare(*open.reader, target, std::move(o)));
  if (target.write_view) {
    TRY(conversion->write_view(destination));
    return {};
  }
  TRY(conversion->run({destination, replace ? files_of_checkpoint : nullptr}));
  return {};
}

#define ASSERT_GOOD(...)                               \
  do {                                                 \
    const Status status_ = (__VA_ARGS__);              \
    ASSERT_TRUE(status_) << status_.error().message(); \
  } while (false)

TEST(Hdf5, KeepsEveryTypeShapeAndName) {
  const TempDir dir;
  const TensorValues tensors = odd_tensors();
  write_dcp(tensors, dir / "ck", Mesh({{"dp_shard", 3}}));
  for (const Compression compression : {Compression{0, true}, Compression{1, true}, Compression{3, false}}) {
    const std::string path = dir / ("a" + std::to_string(compression.zstd_level) + ".h5");
    ASSERT_GOOD(to("hdf5", dir / "ck", path, compression));
    EXPECT_FALSE(fs::exists(path + ".partial"));
    EXPECT_EQ(load_checkpoint(path), tensors) << compression.zstd_level;
    ASSERT_GOOD(to("dcp", path, dir / ("back" + std::to_string(compression.zstd_level))));
    EXPECT_EQ(load_checkpoint(dir / ("back" + std::to_string(compression.zstd_level))), tensors);
  }
  EXPECT_LT(fs::file_size((dir / "a1.h5")), fs::file_size(dir / "a0.h5") * 3 / 4);
}

TEST(Hdf5, ACompressedFileIsTheSameOnAnyThreads) {
  const TempDir dir;
  write_dcp(odd_tensors(), dir / "ck", Mesh({{"dp_shard", 3}}));
  std::string expected;
  for (const int threads : {1, 2, 3, 8}) {
    const std::string path = dir / (std::to_string(threads) + ".h5");
    ASSERT_GOOD(to("hdf5", dir / "ck", path, {1, true}, false, threads));
    if (threads == 1) expected = read_file(path);
    EXPECT_TRUE(read_file(path) == expected) << threads;
  }
}

TEST(Hdf5, KeepsObjectsAndPlacesInTheState) {
  const TempDir dir;
  ASSERT_GOOD(to("hdf5", sample("fsdp4_tp2") + "/checkpoint", dir / "a.h5", {1, true}));
  ASSERT_GOOD(to("dcp", dir / "a.h5", dir / "back"));
  const auto there = open_checkpoint(sample("fsdp4_tp2") + "/checkpoint"), back = open_checkpoint(dir / "back");
  ASSERT_TRUE(there && back);
  const auto paths = [](const Catalog& c) {
    std::map<std::string, std::string> out;
    for (const Tensor& t : c.tensors()) out[t.name] = key_path_text(t.path.empty() ? KeyPath{t.name} : t.path);
    for (const Blob& b : c.blobs) out[b.name] = key_path_text(b.path.empty() ? KeyPath{b.name} : b.path);
    return out;
  };
  EXPECT_EQ(paths(there->reader->catalog()), paths(back->reader->catalog()));
  EXPECT_EQ(load_checkpoint(sample("fsdp4_tp2") + "/checkpoint"), load_checkpoint(dir / "back"));
  for (const Blob& b : there->reader->catalog().blobs)
    for (const Blob& other : back->reader->catalog().blobs)
      if (b.name == other.name) {
        EXPECT_EQ(*there->reader->blob_bytes(b), *back->reader->blob_bytes(other)) << b.name;
      }
}

TEST(Hdf5, ReplacesAFileOfItsKindOnly) {
  const TempDir dir;
  write_dcp({{"w", value(DType::kFloat32, {10}, 1)}}, dir / "ck", Mesh());
  write_file(dir / "notes.txt", "mine");
  const Status refused = to("hdf5", dir / "ck", dir / "notes.txt", {}, true);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUsage);
  EXPECT_EQ(read_file(dir / "notes.txt"), "mine");
  ASSERT_GOOD(to("hdf5", dir / "ck", dir / "a.h5"));
  EXPECT_FALSE(to("hdf5", dir / "ck", dir / "a.h5"));
  write_dcp({{"v", value(DType::kFloat32, {10}, 2)}}, dir / "other", Mesh());
  ASSERT_GOOD(to("hdf5", dir / "other", dir / "a.h5", {}, true));
  EXPECT_EQ(load_checkpoint(dir / "a.h5").count("v"), 1u);
  EXPECT_FALSE(fs::exists(dir / "a.h5.partial"));
}

TEST(Hdf5, NamesADamagedChunk) {
  const TempDir dir;
  write_dcp({{"w", value(DType::kBFloat16, {3000, 1000}, 1)}}, dir / "ck", Mesh());
  ASSERT_GOOD(to("hdf5", dir / "ck", dir / "a.h5", {1, true}));
  Fragment second;
  {
    const auto open = open_checkpoint(dir / "a.h5");
    ASSERT_TRUE(open) << open.error().message();
    const FragmentList& chunks = open->reader->catalog().tensors()[0].fragments;
    ASSERT_EQ(chunks.size(), 6u);
    second = chunks.get(1);
  }
  std::string bytes = read_file(dir / "a.h5");
  char& hit = bytes[static_cast<std::size_t>(second.extent.offset + second.extent.length / 2)];
  hit = static_cast<char>(hit ^ 0x10);
  write_file(dir / "a.h5", bytes);
  const Status status = to("hf", dir / "a.h5", dir / "out");
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(status.error().message(), HasSubstr(at("a.h5", second.extent.offset)));
  EXPECT_THAT(status.error().message(), HasSubstr("tensor 'w' [512:1024, 0:1000]"));
  EXPECT_FALSE(fs::exists(dir / "out"));
}

// The child that tries a file first inherits locks that threads of its parent hold.
TEST(Hdf5, IsTriedInAChildWhileThreadsHoldLocks) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer's allocator does not restore its own locks in a child";
  const TempDir dir;
  const std::string path = dir / "a.h5", other = dir / "b.h5";
  for (const std::string& to : {path, other})
    ASSERT_EQ(reshard_cli({"convert", sample("tp8") + "/hf.safetensors", to, "--to", "hdf5", "-q"}).exit_code, 0);
  std::atomic<bool> stop{false};
  const std::vector<std::function<void()>> works = {
      [] { const std::vector<std::string> all(100, std::string(3000, 'x')); },
      [] {
        try {
          throw std::runtime_error("busy");
        } catch (const std::exception&) {
        }
      },
      [&] { std::ofstream(dir / "said") << "busy" << std::endl; },
      [&] { EXPECT_TRUE(open_checkpoint(other)); },
  };
  std::vector<std::thread> threads;
  for (const auto& work : works)
    threads.emplace_back([&] {
      while (!stop) work();
    });
  for (int i = 0; i < 12; ++i) {
    const auto opened = open_checkpoint(path);
    EXPECT_TRUE(opened) << opened.error().message();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

// A file that is truncated at any length, or has any byte of its metadata changed, gives an error or the same tensors.
TEST(Hdf5, SurvivesDamageToItsMetadata) {
  const TempDir dir;
  write_dcp({{"a.w", value(DType::kFloat32, {4}, 1)}, {"a.v", value(DType::kInt16, {2}, 2)}}, dir / "ck", Mesh());
  ASSERT_GOOD(to("hdf5", dir / "ck", dir / "a.h5", {1, true}));
  const std::string whole = read_file(dir / "a.h5");
  const TensorValues expected = load_checkpoint(dir / "a.h5");
  for (std::size_t n = 0; n < whole.size(); n += 97 * static_cast<std::size_t>(every_nth(4))) {
    write_file(dir / "cut.h5", std::string_view(whole).substr(0, n));
    const auto open = open_checkpoint(dir / "cut.h5");
    EXPECT_FALSE(open) << n;
  }
  std::mt19937 rng(3);
  for (int i = 0; i < 150; i += every_nth(4)) {
    std::string bad = whole;
    bad[rng() % bad.size()] = static_cast<char>(rng());
    write_file(dir / "bad.h5", bad);
    const auto open = open_checkpoint(dir / "bad.h5");
    if (!open) {
      EXPECT_NE(open.error().code(), ErrorCode::kInternal) << open.error().message();
    }
  }
}

TEST(Hdf5, TheConfigTravelsInside) {
  const TempDir dir;
  const std::string source = sample("tp8");
  {
    OpenCheckpoint open = *open_checkpoint(source + "/checkpoint");
    ConversionOptions o;
    o.source_path = source;
    o.config_path = source + "/config.json";
    o.run.memory = Index{1} << 30;
    const auto conversion = Conversion::prepare(*open.reader, kHdf5Format, std::move(o));
    ASSERT_TRUE(conversion) << conversion.error().message();
    ASSERT_TRUE((*conversion)->run({dir / "a.h5"}));
  }
  const auto open = open_checkpoint(dir / "a.h5");
  ASSERT_TRUE(open);
  EXPECT_EQ(*open->reader->side_file("config.json", 1 << 20), read_file(source + "/config.json"));
  EXPECT_THAT(**open->reader->side_file("reshard_manifest.json", 1 << 20), HasSubstr("\"digest\""));
  EXPECT_FALSE(open->reader->side_file("tokenizer.json", 1 << 20)->has_value());
}

TEST(Hdf5View, ShowsPiecesWhereTheyLie) {
  const TempDir dir;
  const TensorValues tensors = {{"whole", value(DType::kBFloat16, {5, 3}, 1)},
                                {"x.cut", value(DType::kFloat32, {9, 2}, 2)}};
  write_dcp({{"whole", tensors.at("whole")}}, dir / "one", Mesh());
  ASSERT_GOOD(to("hdf5-view", dir / "one", dir / "v.h5"));
  EXPECT_LT(fs::file_size(dir / "v.h5"), 10'000u);
  // Data in other files is read only if --allow external is given.
  const auto refused = open_checkpoint(dir / "v.h5");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnsupported);
  EXPECT_THAT(refused.error().message(), HasSubstr("--allow external"));
  OpenOptions options;
  options.external_too = true;
  const auto open = open_checkpoint(dir / "v.h5", options);
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_EQ(open->reader->catalog().tensors()[0].dtype, DType::kBFloat16);

  write_dcp(tensors, dir / "three", Mesh({{"dp_shard", 3}}));
  ASSERT_GOOD(to("hdf5-view", dir / "three", dir / "v3.h5"));
  EXPECT_LT(fs::file_size(dir / "v3.h5"), 20'000u);
}

// The files are from tests/data/hdf5/make.py; each message is checked exactly.
TEST(Hdf5, DatasetsThatAreNoTensorsAreLeftOutAndSaidWhy) {
  const auto listing = hdf5::scan(test_data("hdf5") + "/odd.h5", false);
  ASSERT_TRUE(listing) << listing.error().message();
  std::string text;
  for (const auto& [path, why] : listing->not_tensors) text += path + ": " + why + "\n";
  for (const std::string& warning : listing->catalog.warnings) text += warning + "\n";
  expect_golden("hdf5_odd.txt", text);
  const auto open = open_checkpoint(test_data("hdf5") + "/odd.h5");
  ASSERT_TRUE(open) << open.error().message();
  const auto values = load_values(*open->reader);
  ASSERT_TRUE(values) << values.error().message();
  std::vector<std::string> names;
  for (const auto& [name, v] : *values) names.push_back(name);
  EXPECT_THAT(names, testing::ElementsAre("good.big", "good.bool", "good.complex", "good.float"));
  const std::int64_t big[] = {0, 1, 2, 3};
  EXPECT_EQ(values->at("good.big").bytes, std::string(reinterpret_cast<const char*>(big), sizeof big));
}

// h5py stores what Keras has in bfloat16 as opaque values. tests/data/hdf5/make_keras.py made the files.
TEST(Hdf5, KerasStoresBfloat16AsOpaqueValues) {
  const auto bf16 = [](const std::vector<float>& numbers) {
    std::string out;
    for (const float number : numbers) {
      char bytes[4];
      std::memcpy(bytes, &number, sizeof bytes);
      out.append(bytes + 2, 2);
    }
    return out;
  };
  const TensorValue kernel = {DType::kBFloat16, {3, 2}, bf16({0, 1, 2, 3, 4, 5})};
  const TensorValue bias = {DType::kBFloat16, {2}, bf16({6, 7})};
  EXPECT_TRUE(load_checkpoint(test_data("hdf5") + "/keras.weights.h5") ==
              (TensorValues{{"layers.dense.vars.0", kernel}, {"layers.dense.vars.1", bias}}));
  const std::string layer = "model_weights.dense.sequential.dense.";
  EXPECT_TRUE(load_checkpoint(test_data("hdf5") + "/keras.h5") ==
              (TensorValues{{layer + "kernel", kernel}, {layer + "bias", bias}}));
}

TEST(Hdf5, DamagedFilesAreNamed) {
  std::string text;
  for (const char* name : {"attribute", "depth", "dtype", "link", "object", "path"}) {
    const auto open = open_checkpoint(test_data("hdf5") + "/damaged_" + name + ".h5");
    ASSERT_FALSE(open) << name;
    EXPECT_EQ(open.error().code(), ErrorCode::kCorrupt) << name;
    text += without(open.error().message(), test_data("hdf5") + "/") + "\n";
  }
  expect_golden("hdf5_damaged.txt", text);
}

TEST(Hdf5, ANameThatAnAttributeCannotHoldIsRefused) {
  const TempDir dir;
  write_dcp({{std::string(1'000'000, 'n'), value(DType::kFloat32, {10}, 1)}}, dir / "ck", Mesh());
  const Status refused = to("hdf5", dir / "ck", dir / "a.h5");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnsupported);
  EXPECT_THAT(refused.error().message(), HasSubstr("nnn...': a name of 1,000,000 bytes; HDF5 has room for "));
  EXPECT_LT(refused.error().message().size(), 1000u);
  EXPECT_EQ(reshard_cli({"convert", dir / "ck", dir / "v.h5", "--to", "hdf5-view"}).exit_code, 4);
  EXPECT_FALSE(fs::exists(dir / "a.h5") || fs::exists(dir / "v.h5"));
}

TEST(Hdf5Names, ArePathsWhereTheyCanBe) {
  hdf5::PathMaker paths({"a", "a.b", "m.w", ".x", "y/z", "reshard.q", ""});
  EXPECT_EQ(paths.path_of("m.w"), "m/w");
  EXPECT_EQ(paths.path_of("a.b"), "a/b");
  EXPECT_EQ(paths.path_of("a"), "reshard/tensors/0");
  EXPECT_EQ(paths.path_of(".x"), "reshard/tensors/1");
  EXPECT_EQ(paths.path_of("y/z"), "reshard/tensors/2");
  EXPECT_EQ(paths.path_of("reshard.q"), "reshard/tensors/3");
  EXPECT_EQ(paths.path_of(""), "reshard/tensors/4");
}

TEST(Hdf5Names, KeyPathsComeBack) {
  const KeyPath path = {"state", Index{3}, "w.\"x\""};
  EXPECT_EQ(*parse_key_path(key_path_text(path), "f"), path);
  for (const char* bad : {"", "{}", "[1.5]", "[null]", "[", "7"}) EXPECT_FALSE(parse_key_path(bad, "f")) << bad;
}

TEST(MemoryImage, IsAsAFileWouldBe) {
  std::mt19937 rng(11);
  hdf5::MemoryImage image;
  std::string file(3000, '\0');
  std::vector<bool> written(file.size());
  for (int i = 0; i < 400; ++i) {
    const std::size_t n = rng() % 60, offset = rng() % (file.size() - n);
    const std::string bytes(n, static_cast<char>(1 + rng() % 200));
    image.write(static_cast<Index>(offset), as_bytes(bytes));
    file.replace(offset, n, bytes);
    std::fill_n(written.begin() + static_cast<std::ptrdiff_t>(offset), n, true);
    std::string read(500, 'x');
    const std::size_t from = rng() % 2500;
    image.read(static_cast<Index>(from), {reinterpret_cast<std::byte*>(read.data()), read.size()});
    ASSERT_EQ(read, file.substr(from, 500));
  }
  std::string from_runs(file.size(), '\0');
  std::vector<bool> in_runs(file.size());
  ASSERT_TRUE(image.each_run([&](Index offset, Bytes bytes) -> Status {
    from_runs.replace(static_cast<std::size_t>(offset), bytes.size(), as_string(bytes));
    std::fill_n(in_runs.begin() + offset, bytes.size(), true);
    return {};
  }));
  EXPECT_EQ(from_runs, file);
  EXPECT_EQ(in_runs, written);
}

}  // namespace
}  // namespace reshard::hdf5_test
