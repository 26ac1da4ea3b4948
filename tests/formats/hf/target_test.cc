
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "formats/hf/hf.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::hf_target_test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TargetTensor target(const std::string& name, const Dims& shape, DType dtype = DType::kUint8) {
  TargetTensor tensor;
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.shape = shape;
  return tensor;
}

// Returns the files of a target whose tensor data is `fill`.
std::vector<std::string> files_of(const Target& target, char fill = 'd') {
  std::vector<std::string> files;
  for (const CatalogFile& file : target.catalog().files) files.emplace_back(static_cast<std::size_t>(file.size), fill);
  const auto emit = [&](std::uint32_t file, Index offset, Bytes bytes) -> Status {
    EXPECT_TRUE(fits_inside(offset, static_cast<Index>(bytes.size()), static_cast<Index>(files[file].size())));
    files[file].replace(static_cast<std::size_t>(offset), bytes.size(), as_string(bytes));
    return {};
  };
  EXPECT_TRUE(target.seal({}, emit));
  return files;
}

std::string refusal(LayoutRequest request) {
  const auto target = kHfFormat.lay_out(std::move(request));
  return target ? "accepted" : target.error().message();
}

std::vector<std::string> paths(const Catalog& catalog) {
  std::vector<std::string> out;
  for (const CatalogFile& file : catalog.files) out.push_back(file.path);
  return out;
}

// Expects that a written target opens as the catalog it announced.
void expect_opens_as(const Target& target) {
  TempDir dir;
  const auto files = files_of(target);
  for (std::size_t i = 0; i < files.size(); ++i) dir.write(target.catalog().files[i].path, files[i]);
  const auto reader = open_with(kHfFormat, dir.path(), OpenOptions{});
  ASSERT_TRUE(reader) << reader.error().message();
  const Catalog& got = (*reader)->catalog();
  EXPECT_THAT(got.warnings, IsEmpty());
  EXPECT_THAT(got.stale_files, IsEmpty());
  ASSERT_EQ(got.tensors().size(), target.catalog().tensors().size());
  for (const Tensor& wanted : target.catalog().tensors()) {
    const auto i = got.find(wanted.name);
    ASSERT_TRUE(i) << wanted.name;
    const Tensor& tensor = got.tensors()[*i];
    EXPECT_EQ(tensor.dtype, wanted.dtype);
    EXPECT_EQ(tensor.shape, wanted.shape);
    ASSERT_EQ(tensor.fragments.size(), 1u);
    const Extent &a = tensor.fragments.extent(0), &b = wanted.fragments.extent(0);
    EXPECT_EQ(a.offset, b.offset);
    EXPECT_EQ(a.length, b.length);
    EXPECT_EQ(got.files[a.file].path, target.catalog().files[b.file].path);
  }
}

TEST(SafetensorsWrite, OneFileWhenEverythingFits) {
  LayoutRequest request;
  request.tensors = {target("b", {3}), target("a", {2, 2}, DType::kBFloat16), target("s", {}), target("e", {0, 7})};
  request.max_file_bytes = 12;
  const auto made = kHfFormat.lay_out(request);
  ASSERT_TRUE(made) << made.error().message();
  const Catalog& catalog = (*made)->catalog();
  EXPECT_THAT(paths(catalog), ElementsAre("model.safetensors"));
  EXPECT_EQ(catalog.files[0].size, 4096 + 12);
  EXPECT_EQ(catalog.tensors()[0].name, "b");
  EXPECT_EQ(catalog.tensors()[1].fragments.extent(0), (Extent{0, 4096 + 3, 8}));
  EXPECT_FALSE((*made)->wants_crcs());
  EXPECT_TRUE(validate(catalog));
  expect_opens_as(**made);
}

TEST(SafetensorsWrite, CutsFilesInTheTensorsOrder) {
  LayoutRequest request;
  request.tensors = {target("c", {6}), target("a", {4}), target("huge", {25}), target("b", {1}), target("d", {9})};
  request.max_file_bytes = 10;
  const auto made = kHfFormat.lay_out(request);
  ASSERT_TRUE(made) << made.error().message();
  const Catalog& catalog = (*made)->catalog();
  EXPECT_THAT(paths(catalog), ElementsAre("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                          "model-00003-of-00003.safetensors", "model.safetensors.index.json"));
  EXPECT_EQ(catalog.files[0].size, 4096 + 10);
  EXPECT_EQ(catalog.files[1].size, 4096 + 25);
  EXPECT_EQ(catalog.files[2].size, 4096 + 10);
  EXPECT_EQ(files_of(**made)[3], R"({
  "metadata": {
    "total_size": 45
  },
  "weight_map": {
    "a": "model-00001-of-00003.safetensors",
    "b": "model-00003-of-00003.safetensors",
    "c": "model-00001-of-00003.safetensors",
    "d": "model-00003-of-00003.safetensors",
    "huge": "model-00002-of-00003.safetensors"
  }
}
)");
  expect_opens_as(**made);
}

TEST(SafetensorsWrite, NoTensorsMakeAnEmptyFile) {
  const auto made = kHfFormat.lay_out({});
  ASSERT_TRUE(made) << made.error().message();
  EXPECT_EQ((*made)->catalog().files[0].size, 4096);
  expect_opens_as(**made);
}

TEST(SafetensorsWrite, AnyTensorsAndAnyLimitReadBack) {
  std::mt19937 random(11);
  const auto below = [&](unsigned n) { return static_cast<Index>(random() % n); };
  for (int round = 0; round < 40; ++round) {
    LayoutRequest request;
    Index largest = 0;
    for (Index i = 0, n = below(30); i < n; ++i) {
      Dims shape;
      for (Index d = below(5); d > 0; --d) shape.push_back(below(6));
      request.tensors.push_back(target("layers." + std::to_string(i) + ".\"w\"\t", shape, DType(below(14))));
      largest = std::max(largest, volume(shape) * byte_size(request.tensors.back().dtype));
    }
    request.max_file_bytes = 1 + below(2000);
    const auto made = kHfFormat.lay_out(request);
    ASSERT_TRUE(made) << made.error().message();
    for (const CatalogFile& file : (*made)->catalog().files)
      if (file.path.ends_with(".safetensors")) {
        EXPECT_LE(file.size - (file.size - 1) / 4096 * 4096, 4096);
      }
    EXPECT_TRUE(validate((*made)->catalog()));
    expect_opens_as(**made);
  }
}

TEST(SafetensorsWrite, RefusesWhatItCannotHold) {
  LayoutRequest request;
  request.tensors = {target("w", {2}, DType::kComplex128)};
  EXPECT_EQ(refusal(request), "tensor 'w': safetensors has no element type complex128");
  request.tensors = {target("w", {2}), target("w", {2})};
  EXPECT_NE(refusal(request), "accepted");
  request.tensors = {target("w", {2})};
  request.mesh = Mesh({{"tp", 2}});
  EXPECT_EQ(refusal(request), "a Hugging Face model's files hold whole tensors: expected a mesh of one rank, got tp=2");
  request.mesh = Mesh({{"tp", 1}});
  EXPECT_EQ(refusal(request), "accepted");
  request.blobs.push_back({"step", {}, ""});
  EXPECT_EQ(refusal(request), "a Hugging Face model's files hold tensors only: got object 'step'");
}

}  // namespace
}  // namespace reshard::hf_target_test
