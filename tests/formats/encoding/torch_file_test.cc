#include "formats/encoding/torch_file.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/zip.h"
#include "lib/device/crc32.h"
#include "tests/support/temp_dir.h"

namespace reshard::torch_file_test {
namespace {

const std::string kData = RESHARD_TEST_DATA "/torch_save/";

std::string bytes_of(const std::string& path) { return *read_whole_file(path, 1 << 20); }

class TorchFileTest : public testing::Test {
 protected:
  Result<TorchFile> open(const std::string& bytes) {
    file_.emplace(*File::create_anonymous(directory_.path()));
    EXPECT_TRUE(file_->write_at(0, as_bytes(bytes)));
    return TorchFile::open(*file_, 0, static_cast<Index>(bytes.size()));
  }
  Result<TorchFile> open_data(const std::string& name) { return open(bytes_of(kData + name)); }
  std::string refusal(const Result<TorchFile>& file) { return file ? "accepted" : message(file.error()); }
  // Returns the message without the path.
  std::string message(const Error& error) {
    std::string m = error.message();
    const std::size_t at = m.find(file_->path());
    if (at != std::string::npos) m.erase(at, file_->path().size());
    return m;
  }

  TempDir directory_;
  std::optional<File> file_;
};

pickle::Value member(const TorchFile& file, std::string_view key) { return *file.root().find(key); }

TEST_F(TorchFileTest, ReadsTheSameTensorsFromBothContainers) {
  for (const char* name : {"mixed.pt", "mixed_legacy.pt"}) {
    const auto file = open_data(name);
    ASSERT_TRUE(file) << file.error().message();
    const pickle::Value model = member(*file, "model");
    const auto resolve = [&](std::string_view key) {
      auto t = file->resolve(*model.find(key));
      EXPECT_TRUE(t) << key << ": " << t.error().message();
      return *t;
    };
    const StoredTensor view = resolve("view");
    EXPECT_EQ(view.shape(), (Dims{3, 4})) << name;
    EXPECT_EQ(view.start, 16);
    EXPECT_EQ(view.extent.length, 96);
    float first;
    ASSERT_TRUE(file_->read_at(view.extent.offset + view.start, std::as_writable_bytes(std::span(&first, 1))));
    EXPECT_EQ(first, 4.0f);
    EXPECT_EQ(resolve("transposed").strides, (Dims{1, 6}));
    EXPECT_EQ(resolve("transposed").extent.offset, view.extent.offset) << "views of one storage";
    EXPECT_EQ(resolve("tied_a").extent.offset, resolve("tied_b").extent.offset);
    EXPECT_EQ(resolve("scalar").shape(), Dims{});
    EXPECT_EQ(resolve("empty").shape(), (Dims{0, 3}));
    EXPECT_EQ(resolve("parameter").shape(), Dims{2});
    EXPECT_EQ(resolve("colo").dtype, DType::kFloat16);
    EXPECT_EQ(resolve("f8").dtype, DType::kFloat8E4M3);
    EXPECT_EQ(resolve("u16").dtype, DType::kUint16);
    EXPECT_EQ(resolve("c64").dtype, DType::kComplex64);
    EXPECT_EQ(resolve("flags").dtype, DType::kBool);
    Index second;
    const StoredTensor i64 = resolve("i64");
    ASSERT_TRUE(file_->read_at(i64.extent.offset + 8, std::as_writable_bytes(std::span(&second, 1))));
    EXPECT_EQ(second, Index{1} << 40);
    EXPECT_FALSE(i64.big_endian);
  }
}

TEST_F(TorchFileTest, ReadsEveryPickleProtocolThatTorchWrites) {
  for (const char* name : {"protocol3.pt", "protocol4.pt", "protocol5.pt", "protocol3_legacy.pt", "protocol4_legacy.pt",
                           "protocol5_legacy.pt"}) {
    EXPECT_TRUE(TorchFile::recognises(bytes_of(kData + name).substr(0, TorchFile::kHeadBytes))) << name;
    const auto file = open_data(name);
    ASSERT_TRUE(file) << file.error().message();
    const auto tensor = file->resolve(member(*file, "w"));
    ASSERT_TRUE(tensor) << tensor.error().message();
    EXPECT_EQ(tensor->shape(), Dims{3});
  }
}

TEST_F(TorchFileTest, NamesTheTensorsItRefuses) {
  const auto refused = [&](const std::string& name, std::string_view key) {
    const auto file = open_data(name);
    if (!file) return message(file.error());
    const auto tensor = file->resolve(member(*file, key));
    EXPECT_FALSE(tensor);
    EXPECT_EQ(tensor.error().code(), ErrorCode::kUnsupported);
    return message(tensor.error());
  };
  EXPECT_EQ(refused("quantized.pt", "q"),
            "@0x0: tensor: made by torch._utils._rebuild_qtensor: a quantized tensor: save dequantize(), or int_repr() "
            "and the scales");
  EXPECT_EQ(refused("sparse.pt", "s"),
            "@0x0: tensor: made by torch._utils._rebuild_sparse_tensor: a sparse tensor: save its to_dense()");
  EXPECT_EQ(refused("conj.pt", "c"),
            "@0x0: tensor: has its 'conj' bit set; save it after resolve_conj() and resolve_neg()");
}

TEST_F(TorchFileTest, NamesTheContainersItRefuses) {
  EXPECT_EQ(refusal(open_data("script.pt")),
            "@0x0: a TorchScript archive: load it with torch.jit.load and torch.save its state_dict()");
  EXPECT_EQ(refusal(open_data("program.pt2")),
            "@0x0: torch.export's program archive: load it with torch.export.load and torch.save its state_dict");
  EXPECT_EQ(refusal(open("PYTORCH1 and more")),
            "@0x0: the container of PyTorch 1.5's preview (PYTORCH1); load it with that version and save it again");
  std::string tar(1024, '\0');
  tar.replace(257, 5, "ustar");
  EXPECT_EQ(refusal(open(tar)),
            "@0x0: a tar archive; unpack it with tar -xf and open what it contains. If torch.save wrote it, before "
            "0.1.10, load it with torch.load and save it again");
  EXPECT_FALSE(TorchFile::recognises("PK\x03\x04 of something else, with a name that is not torch's"));
  EXPECT_FALSE(TorchFile::recognises(""));
}

TEST_F(TorchFileTest, EveryTruncationIsAnError) {
  for (const char* name : {"protocol4_legacy.pt", "protocol4.pt"}) {
    const std::string whole = bytes_of(kData + name);
    for (std::size_t n = 0; n < whole.size(); ++n) EXPECT_FALSE(open(whole.substr(0, n))) << name << " " << n;
  }
  EXPECT_EQ(refusal(open(bytes_of(kData + "protocol3_legacy.pt") + "x")), "@0x174: expected the end, got 1 more bytes");
}

// Returns a stream with these parts: object and keys as pickles, then the tail.
std::string stream(const std::string& object, const std::string& keys, const std::string& tail) {
  const std::string head("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e\x80\x02M\xe9\x03.", 21);
  pickle::PickleWriter info;
  info.empty_dict();
  info.mark();
  info.text("protocol_version");
  info.integer(1001);
  info.text("little_endian");
  info.boolean(false);
  info.set_items();
  return head + std::move(info).finish() + object + keys + tail;
}

// Writes a reference to storage 'k' with n elements and, optionally, a view of (offset, size).
void reference(pickle::PickleWriter& w, std::string_view type, Index n, Index offset = -1, Index size = 0) {
  w.mark();
  w.text("storage");
  w.global("torch", type);
  w.text("k");
  w.text("cpu");
  w.integer(n);
  if (offset < 0) {
    w.none();
  } else {
    w.text("v");
    w.integer(offset);
    w.integer(size);
    w.tuple_of_last(3);
  }
  w.tuple_from_mark();
  w.persistent_id();
}

// Returns the pickle of a tensor with 2 elements that starts at element 1 of the view.
std::string tensor_pickle(Index n, Index offset, Index size) {
  pickle::PickleWriter w;
  w.global("torch._utils", "_rebuild_tensor");
  w.mark();
  reference(w, "ShortStorage", n, offset, size);
  w.integer(1);
  w.integers(std::vector<Index>{2});
  w.integers(std::vector<Index>{1});
  w.tuple_from_mark();
  w.reduce();
  return std::move(w).finish();
}

std::string keys_pickle(const std::vector<std::string>& keys) {
  pickle::PickleWriter w;
  w.empty_list();
  w.mark();
  for (const std::string& k : keys) w.text(k);
  w.append_items();
  return std::move(w).finish();
}

std::string size_of(Index n) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(n >> (8 * i));
  return out;
}

TEST_F(TorchFileTest, StreamsHaveViewsOfStoragesAndAreLittleEndianWhateverTheySay) {
  const auto file = open(stream(tensor_pickle(8, 3, 4), keys_pickle({"k"}), size_of(8) + std::string(16, 'x')));
  ASSERT_TRUE(file) << file.error().message();
  const auto tensor = file->resolve(file->root());
  ASSERT_TRUE(tensor) << tensor.error().message();
  EXPECT_EQ(tensor->start, 2 * (3 + 1));
  EXPECT_EQ(tensor->extent.length, 16);
  EXPECT_FALSE(tensor->big_endian);
}

TEST_F(TorchFileTest, RefusesStreamsWhoseStoragesDoNotAddUp) {
  const std::string one = tensor_pickle(8, 3, 4), keys = keys_pickle({"k"}), data(16, 'x');
  const auto contains = [&](const std::string& bytes, std::string_view part) {
    const std::string m = refusal(open(bytes));
    EXPECT_NE(m.find(part), std::string::npos) << m;
  };
  contains(stream(one, keys_pickle({"k", "z"}), size_of(8) + data + size_of(1) + "x"),
           "storage 'z': no tensor refers to it");
  contains(stream(one, keys_pickle({"k", "k"}), size_of(8) + data + size_of(8) + data), "storage 'k': comes twice");
  contains(stream(one, keys, size_of(9) + data), "storage 'k': expected 18 bytes, got 16 before the end");
  contains(stream(one, keys, size_of(-1) + data), "a size that fits 63 bits");
  contains(stream(one, keys, size_of(INT64_MAX / 2 + 1) + data), "a size that fits 63 bits");
  contains(stream(one, keys, "1234"), "expected its size in 8 bytes, got 4 before the end");
  contains(stream(tensor_pickle(8, 7, 4), keys, size_of(8) + data), "a part of the storage's 16 bytes");
  const auto less = open(stream(one, keys, size_of(7) + std::string(14, 'x')));
  ASSERT_TRUE(less);
  EXPECT_FALSE(less->resolve(less->root())) << "the reference says 8 elements";
  const auto absent = open(stream(one, keys_pickle({}), ""));
  ASSERT_TRUE(absent);
  EXPECT_NE(message(absent->resolve(absent->root()).error()).find("no storage 'k'"), std::string::npos);
}

TEST_F(TorchFileTest, ADTensorIsOneRanksPartAndRefused) {
  pickle::PickleWriter w;
  w.global("torch._tensor", "_rebuild_from_type_v2");
  w.mark();
  w.global("torch._utils", "_rebuild_wrapper_subclass");
  w.global("torch.distributed.tensor", "DTensor");
  w.empty_tuple();
  w.none();
  w.tuple_from_mark();
  w.reduce();
  zip::Builder b(0);
  b.add("a/data.pkl", std::move(w).finish());
  const auto file = open(std::move(b).finish().before);
  ASSERT_TRUE(file) << file.error().message();
  ASSERT_TRUE(makes_torch_tensor(file->root()));
  const auto tensor = file->resolve(file->root());
  ASSERT_FALSE(tensor);
  EXPECT_NE(tensor.error().message().find("save its full_tensor()"), std::string::npos);
}

}  // namespace
}  // namespace reshard::torch_file_test
