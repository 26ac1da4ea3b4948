#include "formats/encoding/tensor_file_layout.h"

#include <gtest/gtest.h>

#include <random>

#include "formats/encoding/tensor_file.h"
#include "lib/device/crc32.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

FileTensor tensor(const std::string& name, DType dtype, const Dims& shape) {
  return {.name = name, .dtype = dtype, .shape = shape};
}

// The file whose payloads are these.
std::string file_of(const TensorFileLayout& layout, const std::vector<std::string>& payloads) {
  std::string out(static_cast<std::size_t>(layout.size()), '?');
  const auto put = [&](Index offset, Bytes bytes) -> Status {
    EXPECT_TRUE(fits_inside(offset, static_cast<Index>(bytes.size()), layout.size()));
    out.replace(static_cast<std::size_t>(offset), bytes.size(), as_string(bytes));
    return {};
  };
  for (std::size_t i = 0; i < payloads.size(); ++i) EXPECT_TRUE(put(layout.tensors()[i].offset, as_bytes(payloads[i])));
  const auto crc = [&](const FileTensor& t) {
    return crc32(0, as_bytes(payloads[static_cast<std::size_t>(&t - layout.tensors().data())]));
  };
  EXPECT_TRUE(layout.seal(crc, put));
  return out;
}

TEST(TensorFileLayout, ReadsBackAsItsTensors) {
  const TempDir dir;
  std::mt19937 random(3);
  for (const TensorFileKind kind : {TensorFileKind::kSafetensors, TensorFileKind::kTorchSave}) {
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
      const auto layout = TensorFileLayout::make(kind, tensors);
      ASSERT_TRUE(layout) << layout.error().message();
      const std::string bytes = file_of(*layout, payloads);
      const File file = *File::open(dir.write("f", bytes));
      const auto read = TensorFile::open(file);
      ASSERT_TRUE(read) << read.error().message();
      EXPECT_EQ(read->is_torch(), kind == TensorFileKind::kTorchSave);
      ASSERT_EQ(read->tensors().size(), tensors.size());
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        const auto& [name, path, stored] = read->tensors()[i];
        EXPECT_EQ(name, tensors[i].name);
        EXPECT_EQ(stored.dtype, tensors[i].dtype);
        EXPECT_EQ(stored.shape, tensors[i].shape);
        EXPECT_EQ(stored.strides, row_major_strides(tensors[i].shape));
        EXPECT_EQ(stored.payload_offset, layout->tensors()[i].offset);
        EXPECT_EQ(stored.payload_length, layout->tensors()[i].length);
        const auto at = static_cast<std::size_t>(stored.payload_offset);
        EXPECT_EQ(bytes.substr(at, payloads[i].size()), payloads[i]);
        if (kind == TensorFileKind::kTorchSave) {
          EXPECT_EQ(stored.payload_offset % 64, 0);
        }
      }
    }
  }
}

TEST(TensorFileLayout, TorchFilesGoBeyond4GiB) {
  const TempDir dir;
  const auto layout =
      TensorFileLayout::make(TensorFileKind::kTorchSave,
                             {tensor("a", DType::kUint8, {10}), tensor("b", DType::kFloat32, {Index{1} << 20, 1 << 11}),
                              tensor("c", DType::kBFloat16, {3})});
  ASSERT_TRUE(layout) << layout.error().message();
  const File file = *File::create(dir / "big.bin");
  ASSERT_TRUE(file.set_length(layout->size()));
  ASSERT_TRUE(layout->seal([](const FileTensor&) { return 7u; },
                           [&](Index offset, Bytes bytes) { return file.write_at(offset, bytes); }));
  const auto read = TensorFile::open(file);
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(read->tensors()[1].tensor.payload_length, Index{1} << 33);
  EXPECT_GT(read->tensors()[2].tensor.payload_offset, Index{1} << 33);
  EXPECT_EQ(read->tensors()[2].tensor.crc, 7u);
}

TEST(TensorFileLayout, RefusesWhatTheContainerCannotHold) {
  const auto refusal = [](TensorFileKind kind, FileTensor t) {
    const auto made = TensorFileLayout::make(kind, {std::move(t)});
    return made ? "accepted" : made.error().message();
  };
  const Dims huge = {Index{1} << 40, Index{1} << 40};
  EXPECT_EQ(refusal(TensorFileKind::kTorchSave, tensor("w", DType::kUint8, huge)),
            "tensor 'w': the file's data would be 2^63 bytes or more");
  EXPECT_NE(refusal(TensorFileKind::kSafetensors, tensor("w", DType::kUint8, huge)), "accepted");
  EXPECT_EQ(refusal(TensorFileKind::kTorchSave, tensor("\xff", DType::kUint8, {1})),
            "tensor '\xff': the name is not UTF-8");
  EXPECT_EQ(refusal(TensorFileKind::kSafetensors, tensor("w", DType::kComplex128, {1})),
            "tensor 'w': safetensors has no element type complex128");
  EXPECT_EQ(refusal(TensorFileKind::kTorchSave, tensor("w", DType::kComplex128, {1})), "accepted");
}

}  // namespace
}  // namespace reshard
