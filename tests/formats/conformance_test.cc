// Tests that hold for every format that can be written and read, using only its table row. Includes the toy format of
// the tests. cli/pairs_test.cc tests the same through the program.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "formats/encoding/torch_archive.h"
#include "formats/registry.h"
#include "tests/formats/toy/toy.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

// Returns the formats that hold any tensors. A format that cuts by its own rules (vLLM) or has its own names (Megatron)
// supports only a few models; tests/cli/every_target_test.cc covers those.
std::vector<const Format*> rows() {
  std::vector<const Format*> out = {&kToyFormat};
  for (const Format* f : formats())
    if (f->open && f->lay_out && f->sharding != Sharding::kOwnLocal && f->own_names.empty()) out.push_back(f);
  return out;
}

TensorValues model() {
  TensorValues out;
  std::mt19937 random(1);
  const auto add = [&](const std::string& name, DType dtype, const Dims& shape) {
    TensorValue value{dtype, shape, std::string(static_cast<std::size_t>(volume(shape) * byte_size(dtype)), '\0')};
    for (char& c : value.bytes) c = static_cast<char>(dtype == DType::kBool ? random() % 2 : random());
    out.emplace(name, std::move(value));
  };
  add("model.embed_tokens.weight", DType::kBFloat16, {8, 6});
  add("model.layers.0.self_attn.q_proj.weight", DType::kFloat32, {6, 4});
  add("model.layers.1.self_attn.q_proj.weight", DType::kFloat16, {7, 4});  // not cut evenly
  add("model.layers.1.mask", DType::kBool, {3});
  add("model.layers.1.scales", DType::kFloat8E4M3, {2, 2, 2});
  add("model.layers.1.empty", DType::kFloat32, {0, 3});
  add("model.norm.count", DType::kInt64, {});
  add("names are \"any\" / text\xc3\xa9", DType::kFloat64, {5});
  return out;
}

// Returns a request for the model, for two ranks if the format has a file per rank.
LayoutRequest request_for(const Format& format, const TensorValues& values) {
  LayoutRequest request;
  if (format.takes_mesh()) request.mesh = Mesh({{format.sharding == Sharding::kStages ? "pp" : "tp", 2}});
  for (const auto& [name, value] : values) {
    TargetTensor t{name, value.dtype, value.shape, {name}, {}};
    if (format.sharding == Sharding::kStages)
      t.placement = Placement{{}, static_cast<Index>(request.tensors.size() % 2)};
    else if (format.takes_mesh() && value.shape.rank() > 0)
      t.placement = Placement{{{{"tp"}, 0}}};
    request.tensors.push_back(std::move(t));
  }
  if (format.holds == Holds::kEverything)
    request.blobs.push_back({"step", {"step"}, torch_archive::object_item(std::string_view("\x80\x02N.", 4))});
  return request;
}

class Conformance : public testing::TestWithParam<const Format*> {
 protected:
  const Format& format() const { return *GetParam(); }

  void write(const std::string& path) {
    auto target = format().lay_out(request_for(format(), values_));
    ASSERT_TRUE(target) << target.error().message();
    EXPECT_EQ((*target)->single_file() != nullptr, format().is_file);
    write_target(values_, **target, path);
  }
  // Returns the error of reading a path, or the values.
  Result<TensorValues> read(const std::string& path) {
    const auto reader = TRY(open_with(format(), path));
    return load_values(*reader);
  }
  // Returns the files of a checkpoint: those below a directory, or the single file.
  static std::vector<std::string> files_of(const std::string& path) {
    if (!is_directory(path)) return {path};
    std::vector<std::string> out;
    for (const auto& [name, bytes] : all_files(path)) out.push_back(path_join(path, name));
    return out;
  }
  // Returns the bytes of each file that belong to no tensor.
  std::vector<Index> places_outside_tensors(const std::string& path, const std::string& file, Index size) {
    std::vector<bool> taken(static_cast<std::size_t>(size), false);
    const auto reader = open_with(format(), path);
    EXPECT_TRUE(reader && load_values(**reader));  // this locates them
    const Catalog& catalog = (*reader)->catalog();
    for (const Tensor& t : catalog.tensors())
      for (const FragmentList* list : {&t.fragments, &t.replicas})
        for (std::size_t i = 0; i < list->size(); ++i) {
          const Extent& e = list->extent(i);
          if (catalog.file_path(e.file) == file) std::fill_n(taken.begin() + e.offset, e.length, true);
        }
    std::vector<Index> out;
    for (Index i = 0; i < size; ++i)
      if (!taken[static_cast<std::size_t>(i)]) out.push_back(i);
    return out;
  }

  const TempDir dir_;
  const TensorValues values_ = model();
  std::mt19937 random_{7};
};

TEST_P(Conformance, ReadsWhatItWrites) {
  const std::string path = dir_ / "a";
  ASSERT_NO_FATAL_FAILURE(write(path));
  EXPECT_TRUE(recognises(format(), path));
  EXPECT_EQ(is_directory(path), !format().is_file);
  EXPECT_EQ(*recognised_format(*PathSnapshot::look(path)), &format() == &kToyFormat ? nullptr : &format())
      << "a row before it takes it";
  const auto reader = open_with(format(), path);
  ASSERT_TRUE(reader) << reader.error().message();
  const auto values = load_values(**reader);
  ASSERT_TRUE(values) << values.error().message();
  EXPECT_EQ(*values, values_);
  EXPECT_EQ((*reader)->catalog().stale_files, std::vector<std::string>());
  EXPECT_EQ((*reader)->catalog().warnings, std::vector<std::string>());
  for (const Tensor& t : (*reader)->catalog().tensors()) {
    if (format().holds_whole_tensors()) {
      EXPECT_LE(t.fragments.size(), 1U) << t.name;
    }
  }
  if (format().holds == Holds::kEverything) {
    ASSERT_EQ((*reader)->catalog().blobs.size(), 1U);
    const Blob& blob = (*reader)->catalog().blobs[0];
    EXPECT_EQ(blob.name, "step");
    EXPECT_EQ((*reader)->describe(blob), "None");
    EXPECT_EQ(*(*reader)->blob_bytes(blob), torch_archive::object_item(std::string_view("\x80\x02N.", 4)));
  }
  // The same follows from metadata alone.
  const auto without = open_with(format(), path, {.files_too = false});
  ASSERT_TRUE(without) << without.error().message();
  EXPECT_EQ((*without)->catalog().tensors().size(), values_.size());
}

TEST_P(Conformance, WritesTheSameBytesAgain) {
  ASSERT_NO_FATAL_FAILURE(write(dir_ / "a"));
  ASSERT_NO_FATAL_FAILURE(write(dir_ / "b"));
  const auto a = files_of(dir_ / "a"), b = files_of(dir_ / "b");
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(read_file(a[i]), read_file(b[i])) << a[i];
}

TEST_P(Conformance, RefusesWhatItCannotHold) {
  LayoutRequest request;
  request.tensors = {{"w", DType::kUint8, {Index{1} << 40, Index{1} << 40}, {"w"}, {}}};
  EXPECT_FALSE(format().lay_out(request));
  if (!format().takes_mesh()) {
    request = request_for(format(), values_);
    request.mesh = Mesh({{"tp", 2}});
    EXPECT_FALSE(format().lay_out(request)) << "its row says that it takes no mesh";
  }
}

// A truncated file is an error, unless the missing bytes carry no information.
TEST_P(Conformance, SeesEveryTruncation) {
  const std::string path = dir_ / "a";
  ASSERT_NO_FATAL_FAILURE(write(path));
  for (const std::string& file : files_of(path)) {
    const std::string whole = read_file(file);
    std::vector<std::size_t> lengths = {0, 1, whole.size() / 2, whole.size() - 1};
    for (int i = 0; i < 30; ++i) lengths.push_back(random_() % whole.size());
    for (const std::size_t length : lengths) {
      write_file(file, std::string_view(whole).substr(0, length));
      if (const auto got = read(path)) {
        EXPECT_EQ(*got, values_) << file << " cut to " << length;
      }
    }
    write_file(file, whole);
  }
}

// A flipped bit outside the tensors is an error, or gives a checkpoint with consistent claims: perhaps other names, but
// no bytes read twice, left out, or outside the file. Values have checksums if the format does.
TEST_P(Conformance, SurvivesFlippedBits) {
  const std::string path = dir_ / "a";
  ASSERT_NO_FATAL_FAILURE(write(path));
  Index refused = 0;
  for (const std::string& file : files_of(path)) {
    const std::string whole = read_file(file);
    const auto places = places_outside_tensors(path, file, std::ssize(whole));
    for (int i = 0; i < 60 && !places.empty(); ++i) {
      std::string damaged = whole;
      damaged[static_cast<std::size_t>(places[random_() % places.size()])] ^= static_cast<char>(1 << random_() % 8);
      write_file(file, damaged);
      const auto reader = open_with(format(), path);
      refused += !reader;
      if (!reader) continue;
      EXPECT_TRUE(validate((*reader)->catalog()));
      (void)load_values(**reader);
    }
    write_file(file, whole);
  }
  EXPECT_GT(refused, 0);
  const auto again = read(path);
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(*again, values_);
}

INSTANTIATE_TEST_SUITE_P(Formats, Conformance, testing::ValuesIn(rows()), [](const auto& row) {
  std::string name(row.param->name);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace reshard
