#include "formats/tensor_files/target.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>

#include "formats/encoding/safetensors_header.h"
#include "formats/encoding/tensor_file.h"
#include "lib/device/crc32.h"
#include "tests/support/temp_dir.h"

namespace reshard::tensor_files_target_test {
namespace {

FileTensor tensor(const std::string& name, DType dtype, const Dims& shape) {
  return {.name = name, .dtype = dtype, .shape = shape, .extent = {}};
}

// Returns the target's only file, with these payloads.
std::string file_of(const TensorFilesTarget& target, const std::vector<Extent>& extents,
                    const std::vector<std::string>& payloads) {
  const Index size = target.catalog().files.at(0).size;
  std::string out(static_cast<std::size_t>(size), '?');
  const auto put = [&](std::uint32_t file, Index offset, Bytes bytes) -> Status {
    EXPECT_EQ(file, 0u);
    EXPECT_TRUE(fits_inside(offset, static_cast<Index>(bytes.size()), size));
    out.replace(static_cast<std::size_t>(offset), bytes.size(), as_string(bytes));
    return {};
  };
  for (std::size_t i = 0; i < payloads.size(); ++i) EXPECT_TRUE(put(0, extents[i].offset, as_bytes(payloads[i])));
  const auto crc = [&](const Extent& e) {
    const auto i = std::find(extents.begin(), extents.end(), e) - extents.begin();
    return crc32(0, as_bytes(payloads[static_cast<std::size_t>(i)]));
  };
  EXPECT_TRUE(target.seal(crc, put));
  return out;
}

TEST(TensorFilesTarget, ReadsBackAsItsTensors) {
  const TempDir dir;
  std::mt19937 random(3);
  for (const Container kind : {Container::kSafetensors, Container::kTorchSave}) {
    for (int round = 0; round < 20; ++round) {
      std::vector<FileTensor> tensors;
      std::vector<std::string> payloads;
      for (int i = 0, n = static_cast<int>(random() % 30); i < n; ++i) {
        Dims shape;
        for (auto d = random() % 5; d > 0; --d) shape.push_back(static_cast<Index>(random() % 6));
        tensors.push_back(tensor("l." + std::to_string(i) + ".\"w\"\n\xc3\xa9", DType(random() % 18), shape));
        payloads.emplace_back(static_cast<std::size_t>(volume(shape) * byte_size(tensors.back().dtype)), '\0');
        for (char& c : payloads.back()) c = static_cast<char>(random());
      }
      TensorFilesTarget target;
      const auto extents = target.add_file("f", kind, tensors);
      ASSERT_TRUE(extents) << extents.error().message();
      const std::string bytes = file_of(target, *extents, payloads);
      const File file = *File::open(dir.write("f", bytes));
      const auto read = TensorFile::open(file);
      ASSERT_TRUE(read) << read.error().message();
      EXPECT_EQ(read->is_torch(), kind == Container::kTorchSave);
      ASSERT_EQ(read->tensors().size(), tensors.size());
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        const auto& [name, path, stored, distributed, refusal] = read->tensors()[i];
        EXPECT_FALSE(distributed);
        EXPECT_EQ(name, tensors[i].name);
        EXPECT_EQ(stored.dtype, tensors[i].dtype);
        EXPECT_EQ(stored.shape(), tensors[i].shape);
        EXPECT_EQ(stored.strides, row_major_strides(tensors[i].shape));
        EXPECT_EQ(stored.extent.offset, (*extents)[i].offset);
        EXPECT_EQ(stored.extent.length, (*extents)[i].length);
        const auto at = static_cast<std::size_t>(stored.extent.offset);
        EXPECT_EQ(bytes.substr(at, payloads[i].size()), payloads[i]);
        if (kind == Container::kTorchSave) {
          EXPECT_EQ(stored.extent.offset % 64, 0);
        }
      }
    }
  }
}

TEST(TensorFilesTarget, WholePagesBeginOnPages) {
  TensorFilesTarget target;
  const auto extents = target.add_file("model.safetensors", Container::kSafetensors,
                                       {tensor("norm", DType::kFloat32, {3}), tensor("a", DType::kBFloat16, {2, 1024}),
                                        tensor("none", DType::kInt8, {0}), tensor("bias", DType::kBFloat16, {1025}),
                                        tensor("b", DType::kInt8, {4, 4096})});
  ASSERT_TRUE(extents) << extents.error().message();
  const std::vector<Extent> due = {{0, 24576, 12}, {0, 4096, 4096}, {0, 24588, 0}, {0, 24588, 2050}, {0, 8192, 16384}};
  EXPECT_EQ(*extents, due);
  std::vector<std::string> payloads;
  for (const Extent& e : due) payloads.emplace_back(static_cast<std::size_t>(e.length), 'x');
  const std::string bytes = file_of(target, *extents, payloads);
  const TempDir dir;
  const File file = *File::open(dir.write("f", bytes));
  const auto read = read_safetensors_header(file);
  ASSERT_TRUE(read) << read.error().message();
  std::map<std::string, Index> offsets;
  for (const SafetensorsEntry& e : read->entries) offsets[e.name] = e.offset;
  EXPECT_EQ(offsets, (std::map<std::string, Index>{
                         {"norm", 24576}, {"a", 4096}, {"none", 24588}, {"bias", 24588}, {"b", 8192}}));
}

TEST(TensorFilesTarget, TorchFilesGoBeyond4GiB) {
  const TempDir dir;
  TensorFilesTarget target;
  const auto extents =
      target.add_file("big.bin", Container::kTorchSave,
                      {tensor("a", DType::kUint8, {10}), tensor("b", DType::kFloat32, {Index{1} << 20, 1 << 11}),
                       tensor("c", DType::kBFloat16, {3})});
  ASSERT_TRUE(extents) << extents.error().message();
  const File file = *File::create(dir / "big.bin");
  ASSERT_TRUE(file.set_length(target.catalog().files[0].size));
  ASSERT_TRUE(target.seal([](const Extent&) { return 7u; },
                          [&](std::uint32_t, Index offset, Bytes bytes) { return file.write_at(offset, bytes); }));
  const auto read = TensorFile::open(file);
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(read->tensors()[1].tensor.extent.length, Index{1} << 33);
  EXPECT_GT(read->tensors()[2].tensor.extent.offset, Index{1} << 33);
  EXPECT_EQ(read->tensors()[2].tensor.crc, 7u);
}

TEST(TensorFilesTarget, RefusesWhatTheContainerCannotHold) {
  const auto refusal = [](Container kind, FileTensor t) {
    const auto made = TensorFilesTarget().add_file("f", kind, {std::move(t)});
    return made ? "accepted" : made.error().message();
  };
  const Dims huge = {Index{1} << 40, Index{1} << 40};
  EXPECT_EQ(refusal(Container::kTorchSave, tensor("w", DType::kUint8, huge)),
            "tensor 'w': the file's data would be 2^63 bytes or more");
  EXPECT_NE(refusal(Container::kSafetensors, tensor("w", DType::kUint8, huge)), "accepted");
  EXPECT_EQ(refusal(Container::kTorchSave, tensor("\xff", DType::kUint8, {1})),
            "tensor '\\xff': the name is not UTF-8");
  EXPECT_EQ(refusal(Container::kSafetensors, tensor("w", DType::kComplex128, {1})),
            "tensor 'w': safetensors has no element type complex128");
  EXPECT_EQ(refusal(Container::kTorchSave, tensor("w", DType::kComplex128, {1})), "accepted");
}

}  // namespace
}  // namespace reshard::tensor_files_target_test
