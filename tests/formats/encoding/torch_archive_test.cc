#include "formats/encoding/torch_archive.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/zip.h"
#include "lib/device/crc32.h"
#include "tests/support/temp_dir.h"

namespace reshard::torch_archive_test {
namespace {

File data(const std::string& name) { return *File::open(std::string(RESHARD_TEST_DATA "/dcp_small/") + name); }

std::string bytes_of(const File& file, Index offset, Index length) {
  std::string out(static_cast<std::size_t>(length), '\0');
  EXPECT_TRUE(file.read_at(offset, std::as_writable_bytes(std::span(out.data(), out.size()))));
  return out;
}

class TorchArchive : public testing::Test {
 protected:
  const File& file_of(const std::string& bytes) {
    file_.emplace(*File::create_anonymous(directory_.path()));
    EXPECT_TRUE(file_->write_at(0, as_bytes(bytes)));
    return *file_;
  }
  Result<StoredTensor> tensor(const std::string& bytes) {
    return torch_archive::read_tensor_item(file_of(bytes), 0, static_cast<Index>(bytes.size()));
  }
  // Returns the error for an archive with this data.pkl and 24 bytes of storage '0'.
  std::string error_of(const std::string& pickle) {
    zip::Builder b(0);
    b.add("archive/data.pkl", pickle);
    b.add("archive/data/0", std::string(24, 'x'));
    const auto t = tensor(std::move(b).finish().before);
    if (t) return "";
    const std::string& m = t.error().message();
    const std::size_t at = m.find("tensor: ");
    return at == std::string::npos ? m : m.substr(at);
  }

  TempDir directory_;
  std::optional<File> file_;
};

// Returns the pickle of a v2 tensor with these numbers.
std::string v2(const std::string& storage, Index numel, Index offset, std::vector<Index> size,
               std::vector<Index> stride, std::string_view function = "_rebuild_tensor_v2", std::string_view bit = "") {
  pickle::PickleWriter w;
  w.global("torch._utils", function);
  w.mark();
  w.mark();
  w.text("storage");
  w.global("torch", storage);
  w.text("0");
  w.text("cpu");
  w.integer(numel);
  w.tuple_from_mark();
  w.persistent_id();
  w.integer(offset);
  w.integers(size);
  w.integers(stride);
  w.boolean(false);
  w.global("collections", "OrderedDict");
  w.empty_tuple();
  w.reduce();
  if (!bit.empty()) {
    w.empty_dict();
    w.mark();
    w.text(bit);
    w.boolean(true);
    w.set_items();
  }
  w.tuple_from_mark();
  w.reduce();
  return std::move(w).finish();
}

TEST_F(TorchArchive, FindsTheTensorsOfARealCheckpoint) {
  const File file = data("ck2/__0_0.distcp");
  const auto t = torch_archive::read_tensor_item(file, 864, 1180);
  ASSERT_TRUE(t) << t.error().message();
  EXPECT_EQ(t->dtype, DType::kBFloat16);
  EXPECT_EQ(t->shape(), (Dims{2, 3}));
  EXPECT_EQ(t->strides, (Dims{3, 1}));
  EXPECT_EQ(t->extent.offset, 864 + 448);
  EXPECT_EQ(t->extent.length, 12);
  EXPECT_EQ(t->start, 0);
  EXPECT_FALSE(t->big_endian);
  EXPECT_EQ(t->crc, crc32(0, as_bytes(bytes_of(file, t->extent.offset, 12))));
}

TEST_F(TorchArchive, KeepsTheStridesOfTransposedAndChannelsLastTensors) {
  const File file = data("ck1/__0_0.distcp");
  const auto transposed = torch_archive::read_tensor_item(file, 27604, 1180);
  ASSERT_TRUE(transposed);
  EXPECT_EQ(transposed->shape(), (Dims{3, 2}));
  EXPECT_EQ(transposed->strides, (Dims{1, 3}));
  const auto channels_last = torch_archive::read_tensor_item(file, 31144, 1244);
  ASSERT_TRUE(channels_last);
  EXPECT_EQ(channels_last->strides, (Dims{24, 1, 8, 2}));
}

TEST_F(TorchArchive, ReadsTypesWithoutAStorageClass) {
  const File file = data("ck1/__0_0.distcp");
  const auto u16 = torch_archive::read_tensor_item(file, 35928, 1180);
  ASSERT_TRUE(u16);
  EXPECT_EQ(u16->dtype, DType::kUint16);
  EXPECT_EQ(u16->extent.length, 4);
  const auto f8 = torch_archive::read_tensor_item(file, 37108, 1180);
  ASSERT_TRUE(f8);
  EXPECT_EQ(f8->dtype, DType::kFloat8E4M3);
}

TEST_F(TorchArchive, ReadsObjects) {
  const File file = data("ckz/__0_0.distcp");
  const auto betas = torch_archive::read_object_item(file, 3520, 864);
  ASSERT_TRUE(betas) << betas.error().message();
  EXPECT_EQ(pickle::print(betas->root()), "(0.9, 0.95)");
}

TEST_F(TorchArchive, ItemsItLaysOutReadBack) {
  const std::vector<std::pair<DType, Dims>> cases = {{DType::kBFloat16, {2, 3}},       {DType::kFloat32, {70000, 2}},
                                                     {DType::kFloat8E5M2, {4, 4}},     {DType::kUint64, {7}},
                                                     {DType::kComplex128, {3}},        {DType::kFloat32, {0, 4}},
                                                     {DType::kInt32, {1, 2, 3, 4, 5}}, {DType::kBool, {}}};
  for (const auto& [dtype, shape] : cases)
    for (Index base : {0, 1, 864, 4097}) {
      torch_archive::Item item(dtype, shape, base);
      EXPECT_EQ(item.payload_bytes(), volume(shape) * byte_size(dtype));
      const std::string payload(static_cast<std::size_t>(item.payload_bytes()), 'p');
      const std::uint32_t crc = crc32(0, as_bytes(payload));
      for (const std::uint32_t value : {0xffffffffu, crc}) {
        item.set_crc(value);
        torch_archive::Item further(dtype, shape, base + 5 * torch_archive::kAlignment);
        further.set_crc(value);
        EXPECT_EQ(item.header(), further.header());
        EXPECT_EQ(item.trailer(), further.trailer());
      }
      const File& file =
          file_of(std::string(static_cast<std::size_t>(base), '#') + item.header() + payload + item.trailer());
      EXPECT_TRUE(torch_archive::check_item(file, base, item.total()));
      const auto t = torch_archive::read_tensor_item(file, base, item.total());
      ASSERT_TRUE(t) << t.error().message();
      EXPECT_EQ(t->dtype, dtype);
      EXPECT_EQ(t->shape(), shape);
      EXPECT_EQ(t->strides, row_major_strides(shape));
      EXPECT_EQ(t->extent.offset, base + item.header_bytes());
      EXPECT_EQ(t->extent.offset % 64, 0);
      EXPECT_EQ(t->crc, crc);
    }
}

TEST_F(TorchArchive, AnItemBeyondFourGibibytesReadsBack) {
  torch_archive::Item item(DType::kFloat32, Dims{1 << 20, 1 << 11}, 0);
  item.set_crc(0x12345678);
  EXPECT_EQ(item.payload_bytes(), Index{1} << 33);
  const File& file = file_of(item.header());  // the payload is a hole
  ASSERT_TRUE(file.write_at(item.header_bytes() + item.payload_bytes(), as_bytes(item.trailer())));
  const auto t = torch_archive::read_tensor_item(file, 0, item.total());
  ASSERT_TRUE(t) << t.error().message();
  EXPECT_EQ(t->extent, (Extent{0, item.header_bytes(), item.payload_bytes()}));
  EXPECT_EQ(t->crc, 0x12345678u);
}

TEST_F(TorchArchive, ObjectsItWrapsReadBack) {
  pickle::PickleWriter w;
  w.integer(7);
  const std::string item = torch_archive::object_item(std::move(w).finish());
  const auto read = torch_archive::read_object_item(file_of(item), 0, static_cast<Index>(item.size()));
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(read->root().as_int(), 7);
}

TEST_F(TorchArchive, RefusesStridesThatLeaveTheStorage) {
  EXPECT_EQ(error_of(v2("FloatStorage", 6, 0, {2, 3}, {3, 1})), "");
  EXPECT_EQ(error_of(v2("FloatStorage", 6, 1, {2, 3}, {3, 1})),
            "tensor: shape [2, 3] with strides [3, 1] from byte 4 on: expected to stay inside the storage of 24 bytes, "
            "got 28");
  EXPECT_NE(error_of(v2("FloatStorage", 6, 0, {2, 3}, {INT64_MAX, 1})).find("an overflow"), std::string::npos);
  EXPECT_NE(error_of(v2("FloatStorage", 6, 0, {INT64_MAX, 3}, {0, 0})).find("more than 2^63 bytes"), std::string::npos);
  EXPECT_NE(error_of(v2("FloatStorage", 6, INT64_MAX, {1}, {1})), "");
  EXPECT_NE(error_of(v2("FloatStorage", 6, 0, {2}, {-1})), "");
  EXPECT_NE(error_of(v2("FloatStorage", 6, 0, {2, 3}, {1})), "");
  EXPECT_NE(error_of(v2("FloatStorage", 6, 0, {1, 1, 1, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 1, 1, 1})), "");
}

TEST_F(TorchArchive, RefusesStoragesOfAnotherSize) {
  zip::Builder b(0);
  b.add("archive/data.pkl", v2("FloatStorage", 5, 0, {5}, {1}));
  b.add("archive/data/0", std::string(24, 'x'));
  const auto t = tensor(std::move(b).finish().before);
  ASSERT_FALSE(t);
  EXPECT_NE(t.error().message().find("member 'archive/data/0': expected 20 bytes, got 24"), std::string::npos);
}

TEST_F(TorchArchive, RefusesTensorsThatAreNotPlainByName) {
  EXPECT_NE(error_of(v2("FloatStorage", 6, 0, {6}, {1}, "_rebuild_qtensor")).find("torch._utils._rebuild_qtensor"),
            std::string::npos);
  EXPECT_NE(error_of(v2("QInt8Storage", 24, 0, {24}, {1})).find("torch.QInt8Storage is not supported"),
            std::string::npos);
  EXPECT_NE(error_of(v2("ComplexFloatStorage", 3, 0, {3}, {1}, "_rebuild_tensor_v2", "conj")).find("'conj' bit set"),
            std::string::npos);
}

TEST_F(TorchArchive, UnwrapsParameters) {
  const std::string inner = v2("FloatStorage", 6, 0, {6}, {1});
  const std::string call = inner.substr(2, inner.size() - 3);  // without PROTO and STOP
  zip::Builder b(0);
  b.add("archive/data.pkl",
        "\x80\x02"
        "ctorch._utils\n_rebuild_parameter\n" +
            call + "\x88}\x87R.");
  b.add("archive/data/0", std::string(24, 'x'));
  const auto t = tensor(std::move(b).finish().before);
  ASSERT_TRUE(t) << t.error().message();
  EXPECT_EQ(t->shape(), Dims{6});
}

TEST_F(TorchArchive, SaysWhenAnItemIsStale) {
  const auto t = tensor(std::string(1180, '\0'));
  ASSERT_FALSE(t);
  EXPECT_NE(t.error().message().find("stale, or overwritten"), std::string::npos);
}

TEST_F(TorchArchive, EveryTruncationIsAnErrorAndEveryFlipIsReadOrRefused) {
  const std::string whole = bytes_of(data("ck2/__0_0.distcp"), 864, 1180);
  const File& file = file_of(whole);
  for (Index n = 0; n < 1180; ++n) EXPECT_FALSE(torch_archive::read_tensor_item(file, 0, n)) << n;
  for (std::size_t i = 0; i < whole.size(); ++i)
    for (int flip : {0x01, 0x20, 0xff}) {
      const std::string one(1, static_cast<char>(whole[i] ^ flip));
      ASSERT_TRUE(file.write_at(static_cast<Index>(i), as_bytes(one)));
      const auto t = torch_archive::read_tensor_item(file, 0, 1180);
      if (t) {
        EXPECT_LE(t->extent.offset + t->extent.length, 1180);
      }
      ASSERT_TRUE(file.write_at(static_cast<Index>(i), as_bytes(whole.substr(i, 1))));
    }
}

}  // namespace
}  // namespace reshard::torch_archive_test
