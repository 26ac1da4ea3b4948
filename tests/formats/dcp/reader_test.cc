// Tests reading items of a DCP.
#include <gtest/gtest.h>
#include <zstd.h>

#include <numeric>

#include "formats/dcp/metadata.h"
#include "formats/open.h"
#include "lib/source/tensor_source.h"
#include "tests/support/checkpoints.h"
#include "tests/support/dcp_metadata.h"
#include "tests/support/temp_dir.h"

namespace reshard::dcp_reader_test {
namespace {

std::string compressed(const std::string& bytes) {
  std::string frame(ZSTD_compressBound(bytes.size()), '\0');
  frame.resize(ZSTD_compress(frame.data(), frame.size(), bytes.data(), bytes.size(), 1));
  return frame;
}

// Every third item is compressed, so some threads decode while others read stored items. `valgrind --tool=drd` reports
// no conflict.
TEST(DcpReader, DecodesItemsInSeveralThreads) {
  constexpr Index kTensors = 120, kFiles = 7;
  const TempDir dir;
  TensorValues values;
  std::vector<std::string> files(kFiles), names;
  std::vector<TargetTensor> tensors;
  std::vector<dcp::WrittenEntry> entries;
  for (Index i = 0; i < kTensors; ++i)
    tensors.push_back({"w" + std::to_string(i), DType::kUint8, {64 + i}, {"w" + std::to_string(i)}, {}});
  for (Index i = 0; i < kTensors; ++i) {
    const TargetTensor& t = tensors[static_cast<std::size_t>(i)];
    std::string& file = files[static_cast<std::size_t>(i % kFiles)];
    const TensorValue value{t.dtype, t.shape, std::string(static_cast<std::size_t>(t.shape[0]), static_cast<char>(i))};
    values.emplace(t.name, value);
    const auto begin = static_cast<Index>(file.size());
    const std::string item = dcp_item(t.dtype, t.shape, i % 3 == 0 ? 0 : begin, value.bytes);
    file += i % 3 == 0 ? compressed(item) : item;
    dcp::WrittenItem written{whole(t.shape), static_cast<std::uint32_t>(i % kFiles), begin,
                             static_cast<Index>(file.size()) - begin};
    entries.push_back({&t, t.name, t.path, {written}});
  }
  for (Index f = 0; f < kFiles; ++f) {
    names.push_back("__" + std::to_string(f) + "_0.distcp");
    dir.write(names.back(), files[static_cast<std::size_t>(f)]);
  }
  dir.write(".metadata", dcp::write_metadata(entries, names));
  for (int round = 0; round < 20; ++round) {
    OpenCheckpoint open = *open_checkpoint(dir.path());
    Catalog& catalog = open.reader->catalog();
    std::vector<std::size_t> all(catalog.tensors().size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    // Locates in two steps; data decoded in the first step remains valid.
    const std::vector<std::size_t> first(all.begin(), all.begin() + 40);
    ASSERT_TRUE(open.reader->locate(first, 8, dir.path()));
    const Status located = open.reader->locate(all, 8, dir.path());
    ASSERT_TRUE(located) << located.error().message();
    EXPECT_EQ(catalog.files.size(), static_cast<std::size_t>(kFiles) + 1);
    FileSource source(catalog, open.reader->files());
    std::vector<std::byte> scratch(std::size_t{1} << 20);
    for (const std::size_t i : all) {
      const Tensor& t = catalog.tensors()[i];
      std::string bytes(static_cast<std::size_t>(t.bytes()), '\0');
      const Status read = source.read(i, whole(t.shape), std::as_writable_bytes(std::span(bytes)), scratch);
      ASSERT_TRUE(read) << read.error().message();
      EXPECT_EQ(bytes, values.at(t.name).bytes) << t.name;
    }
  }
  // Without decoded items there is no such file.
  OpenCheckpoint open = *open_checkpoint(dir.path());
  Catalog& catalog = open.reader->catalog();
  ASSERT_TRUE(open.reader->locate({*catalog.find("w1"), *catalog.find("w2")}, 8, dir.path()));
  EXPECT_EQ(catalog.files.size(), static_cast<std::size_t>(kFiles));
}

}  // namespace
}  // namespace reshard::dcp_reader_test
