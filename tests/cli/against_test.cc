// Tests `reshard verify A --against B`. For checkpoints of two dtypes, their order makes no difference, and values that
// a cast changed are a difference unless the output's own manifest records the cast. Objects of two formats are
// compared by value.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/device/convert.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::against_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr Index kElements = 64;

void write_safetensors(const TensorValues& values, const std::string& path) {
  Json header = Json::object();
  std::string data;
  for (const auto& [name, t] : values) {
    Json shape = Json::array(), offsets = Json::array();
    Dims counted = t.shape;
    if (t.dtype == DType::kFloat4E2M1x2) counted[counted.rank() - 1] *= 2;  // a byte has two values
    for (const Index extent : counted) shape.push_back(extent);
    offsets.push_back(std::ssize(data));
    data += t.bytes;
    offsets.push_back(std::ssize(data));
    header.set(name, Json::object()
                         .set("dtype", info(t.dtype).safetensors_name)
                         .set("shape", std::move(shape))
                         .set("data_offsets", std::move(offsets)));
  }
  const std::string text = to_text(header);
  const std::uint64_t length = text.size();
  write_file(path, std::string(reinterpret_cast<const char*>(&length), 8) + text + data);
}

std::vector<DType> stored_dtypes() {
  std::vector<DType> out;
  for (int i = 0; i <= static_cast<int>(DType::kFloat4E2M1x2); ++i)
    if (const auto dtype = static_cast<DType>(i); !info(dtype).safetensors_name.empty()) out.push_back(dtype);
  return out;
}

std::string cast(const std::string& bytes, DType from, DType to) {
  std::string out(static_cast<std::size_t>(kElements * byte_size(to)), '\0');
  convert(from, to, reinterpret_cast<const std::byte*>(bytes.data()), reinterpret_cast<std::byte*>(out.data()),
          kElements);
  return out;
}

// With `exact`, returns numbers that every floating-point dtype can represent. Otherwise includes some that each dtype
// rounds, one that is too large and one that is too small for most.
TensorValue values_of(DType dtype, bool exact) {
  std::vector<float> numbers;
  for (Index i = 0; i < kElements; ++i) numbers.push_back(static_cast<float>(i % 8 - 4) * (exact ? 0.5F : 0.37F));
  if (!exact) numbers[0] = 30000, numbers[1] = 1e-30F;
  const std::string bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float));
  if (can_convert(DType::kFloat32, dtype)) return {dtype, {8, 8}, cast(bytes, DType::kFloat32, dtype)};
  std::string ones;  // for an integer, a boolean, ...
  for (Index i = 0; i < kElements; ++i) (ones += '\1').append(static_cast<std::size_t>(byte_size(dtype)) - 1, '\0');
  return {dtype, {8, 8}, ones};
}

TensorValue as(const TensorValue& value, DType dtype) {
  if (!can_convert(value.dtype, dtype)) return values_of(dtype, true);
  return {dtype, value.shape, cast(value.bytes, value.dtype, dtype)};
}

std::map<std::string, bool> compared(const std::string& a, const std::string& b, int exit_code) {
  const CommandResult r = reshard_cli({"verify", a, "--against", b, "--json"});
  EXPECT_EQ(r.exit_code, exit_code) << r.out << r.err;
  std::map<std::string, bool> out;
  const Json json = *parse_json(r.out, "out");
  const auto tensors = *json.get_array("tensors");
  for (const Json& t : tensors) out[std::string(*t.get_string("name"))] = *t.get_bool("equal");
  return out;
}

TEST(Against, EveryPairOfDtypesIsComparedAlikeInBothOrders) {
  const TempDir dir;
  TensorValues a, b;
  std::map<std::string, bool> expected;
  for (const bool exact : {true, false})
    for (const DType from : stored_dtypes())
      for (const DType to : stored_dtypes()) {
        const std::string name =
            std::string(info(from).torch_name) + (exact ? "=" : "~") + std::string(info(to).torch_name);
        a[name] = values_of(from, exact);
        b[name] = from == to ? a[name] : as(a[name], to);
        const bool is_rounded = byte_size(from) != byte_size(to);
        expected[name] = from == to || (can_convert(from, to) && (exact || is_rounded));
      }
  write_safetensors(a, dir / "a.safetensors");
  write_safetensors(b, dir / "b.safetensors");
  EXPECT_EQ(compared(dir / "a.safetensors", dir / "b.safetensors", 1), expected);
  EXPECT_EQ(compared(dir / "b.safetensors", dir / "a.safetensors", 1), expected);
}

// Values rounded by `convert --dtype` match if the manifest records the cast, under any names; without the manifest
// they differ.
TEST(Against, ACastBetweenTypesOfOneWidthNeedsTheManifest) {
  for (const char* wrapper : sampled({"", "app.model.", "blocks."}, 3)) {
    const TempDir dir;
    TensorValues values;
    values[wrapper + std::string("layer.weight")] = values_of(DType::kBFloat16, false);
    values[wrapper + std::string("norm.weight")] = values_of(DType::kBFloat16, true);
    write_dcp(values, dir / "source", Mesh({{"dp_shard", 2}}));
    for (const char* format : {"dcp", "hf"}) {
      const std::string out = dir / format;
      const CommandResult made =
          reshard_cli({"convert", dir / "source", out, "--to", format, "--dtype", "float16", "--family", "none"});
      ASSERT_EQ(made.exit_code, 0) << made.err;
      const CommandResult there = reshard_cli({"verify", dir / "source", "--against", out});
      const CommandResult back = reshard_cli({"verify", out, "--against", dir / "source"});
      for (const CommandResult& r : {there, back}) {
        EXPECT_EQ(r.exit_code, 0) << wrapper << format << "\n" << r.out << r.err;
        EXPECT_THAT(r.out, HasSubstr("2 of them after the cast that reshard_manifest.json records"));
      }
      fs::remove(out + "/reshard_manifest.json");
      for (const auto& [a, b] : {std::pair(dir / "source", out), std::pair(out, dir / "source")}) {
        const CommandResult r = reshard_cli({"verify", a, "--against", b});
        EXPECT_EQ(r.exit_code, 1) << wrapper << format << "\n" << r.out << r.err;
        EXPECT_THAT(r.out, HasSubstr("layer.weight: values differ"));
        EXPECT_THAT(r.out, HasSubstr("a cast from one to the other changes values"));
        EXPECT_THAT(r.out, HasSubstr("1 of 2 tensors, digest for digest"));
      }
    }
  }
}

// tests/data/objects has each state twice, in a file of torch.save and in a directory of Distributed Checkpoint, which
// encode the same objects differently.
const std::string kObjects = RESHARD_TEST_DATA "/objects/";

TEST(Against, ObjectsOfTwoFormatsAreComparedByValue) {
  for (const std::string state : {"weights", "run"})
    for (const auto& [a, b] : {std::pair(state, state + ".pt"), std::pair(state + ".pt", state)}) {
      const CommandResult verified = reshard_cli({"verify", kObjects + a, "--against", kObjects + b});
      EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
      const CommandResult compared = reshard_cli({"diff", kObjects + a, kObjects + b});
      EXPECT_EQ(compared.exit_code, 0) << compared.out << compared.err;
    }
}

TEST(Against, ObjectsOfTwoFormatsThatDifferAreReported) {
  struct Case {
    std::string a, b, difference;
  };
  for (const auto& [a, b, difference] : {Case{"weights", "weights_step8", "object 'step'"},
                                         Case{"weights", "weights_epoch", "object 'epoch' is only in "},
                                         Case{"run", "run_lr", "object 'optim.param_groups.0.lr'"}})
    for (const auto& [one, other] : {std::pair(a, b + ".pt"), std::pair(a + ".pt", b), std::pair(b, a + ".pt"),
                                     std::pair(b + ".pt", a), std::pair(a, b), std::pair(a + ".pt", b + ".pt")}) {
      const CommandResult verified = reshard_cli({"verify", kObjects + one, "--against", kObjects + other});
      EXPECT_EQ(verified.exit_code, 1) << one << " " << other << verified.out << verified.err;
      EXPECT_THAT(verified.out, HasSubstr("error     " + difference));
      EXPECT_THAT(verified.out, HasSubstr("1 error, "));
      const CommandResult compared = reshard_cli({"diff", kObjects + one, kObjects + other});
      EXPECT_EQ(compared.exit_code, 1) << one << " " << other << compared.out << compared.err;
      EXPECT_THAT(compared.out, HasSubstr("differs   " + difference));
      EXPECT_THAT(compared.out, HasSubstr("1 object missing or different"));
    }
}

TEST(Against, ObjectsThatOnlyARunHasAreNoDifferenceFromItsModel) {
  for (const std::string run : {"weights", "run", "weights.pt", "run.pt"})
    for (const std::string model : {"model", "model.pt"}) {
      EXPECT_EQ(reshard_cli({"verify", kObjects + run, "--against", kObjects + model}).exit_code, 0) << run << model;
      EXPECT_EQ(reshard_cli({"diff", kObjects + model, kObjects + run}).exit_code, 0) << run << model;
    }
}

}  // namespace
}  // namespace reshard::against_test
