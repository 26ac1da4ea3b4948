#include "formats/encoding/tensor_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_archive.h"
#include "formats/encoding/zip.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::tensor_file_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const std::string kData = RESHARD_TEST_DATA "/torch_save/";

std::vector<std::string> names(const TensorFile& file) {
  std::vector<std::string> out;
  for (const auto& e : file.tensors()) out.push_back(e.name + " " + to_string(e.tensor.shape()));
  return out;
}

std::vector<std::string> values(const TensorFile& file) {
  std::vector<std::string> out;
  for (const auto& o : file.objects()) out.push_back(o.name + " = " + pickle::print(o.value));
  return out;
}

class TensorFileTest : public testing::Test {
 protected:
  Result<TensorFile> open(const std::string& bytes) {
    return TensorFile::open(*File::open(directory_.write("f", bytes)));
  }
  // Returns the error for an archive with this pickle.
  std::string refusal(const std::string& pickle) {
    const auto file = open(torch_archive::object_item(pickle));
    return file ? "accepted" : file.error().message();
  }
  TempDir directory_;
};

// A key of 30,000 letters above 2,000 numbers would make 120 MB of names.
TEST_F(TensorFileTest, NamesAreInProportionToThePickle) {
  const auto nested = [](std::size_t letters) {
    pickle::PickleWriter w;
    w.empty_dict();
    w.mark();
    w.text(std::string(letters, 'k'));
    w.empty_dict();
    w.mark();
    for (Index i = 0; i < 2000; ++i) {
      w.text(std::to_string(i));
      w.integer(i);
    }
    w.set_items();
    w.set_items();
    return std::move(w).finish();
  };
  EXPECT_EQ(refusal(nested(300)), "accepted");
  EXPECT_THAT(refusal(nested(30'000)), HasSubstr("out of proportion to the pickle"));
}

// torch.zeros(1).expand(2**30, 2**30), saved by torch.
TEST_F(TensorFileTest, FewBytesAreNotRepeatedToAnySize) {
  const auto file = TensorFile::open(*File::open(kData + "expanded.pt"));
  ASSERT_FALSE(file);
  EXPECT_THAT(file.error().message(), HasSubstr("'w': "));
  EXPECT_THAT(file.error().message(), HasSubstr("repeats the storage's 4 bytes to 4,611,686,018,427,387,904"));
}

TEST_F(TensorFileTest, NamesValuesByTheirPathsInBothContainers) {
  for (const char* name : {"mixed.pt", "mixed_legacy.pt"}) {
    const auto file = TensorFile::open(*File::open(kData + name));
    ASSERT_TRUE(file) << file.error().message();
    EXPECT_TRUE(file->is_torch());
    EXPECT_THAT(names(*file),
                ElementsAre("model.view [3, 4]", "model.transposed [6, 4]", "model.tied_a [2, 3]",
                            "model.tied_b [2, 3]", "model.scalar []", "model.empty [0, 3]", "model.parameter [2]",
                            "model.colo [4]", "model.f8 [3]", "model.u16 [2]", "model.c64 [1]", "model.flags [3]",
                            "model.i64 [2]", "state.0.exp_avg [2]", "state.1.step []", "pair.0 [2]"));
    EXPECT_THAT(
        values(*file),
        ElementsAre("epoch = 3", "none = None", "groups.0.lr = 0.0003", "groups.0.betas = (0.9, 0.95)",
                    "groups.0.params = [0, 1]", "state.0.step = 7", "pair.1 = 'x'", testing::StartsWith("bytes = "),
                    "big = 0x100000000000000000000", testing::StartsWith("set = "), "nothing = {}"));
    EXPECT_EQ(file->objects()[3].path, (KeyPath{"groups", Index{0}, "betas"}));
    EXPECT_EQ(file->tensors()[13].path, (KeyPath{"state", "0", "exp_avg"}));
  }
}

TEST_F(TensorFileTest, AFileThatIsOneTensorIsCalledValue) {
  const auto file = TensorFile::open(*File::open(kData + "bare.pt"));
  ASSERT_TRUE(file) << file.error().message();
  EXPECT_THAT(names(*file), ElementsAre("value [3]"));
}

TEST_F(TensorFileTest, ReadsSafetensorsAndTheObjectsAmongThem) {
  std::vector<SafetensorsEntry> entries = {{.name = "state.0.exp_avg", .dtype = DType::kFloat32, .shape = {2, 2}},
                                           {.name = "state.0.step", .dtype = DType::kUint8, .shape = {5}}};
  const auto with = [&](const std::string& keys, const std::string& data) {
    return open(*safetensors_header(entries, {{"non_tensor_keys", keys}}, 8) + std::string(16, 'x') + data);
  };
  const std::string seven("\x80\x04K\x07.", 5);
  const auto file = with("[\"state.0.step\"]", seven);
  ASSERT_TRUE(file) << file.error().message();
  EXPECT_FALSE(file->is_torch());
  EXPECT_THAT(names(*file), ElementsAre("state.0.exp_avg [2, 2]"));
  EXPECT_THAT(values(*file), ElementsAre("state.0.step = 7"));
  EXPECT_EQ(file->tensors()[0].tensor.strides, (Dims{2, 1}));

  EXPECT_THAT(with("[\"state.0.step\"]", "\x80\x04K\x07x").error().message(), HasSubstr("object 'state.0.step'@0x4"));
  EXPECT_THAT(with("[\"absent\"]", seven).error().message(), HasSubstr("expected entries of this file, got 'absent'"));
  EXPECT_THAT(with("[\"state.0.exp_avg\"]", seven).error().message(),
              HasSubstr("object 'state.0.exp_avg': expected a vector of U8, got F32 [2, 2]"));
  EXPECT_THAT(with("7", seven).error().message(), HasSubstr("non_tensor_keys"));
}

TEST_F(TensorFileTest, AContainerInItselfIsRefused) {
  pickle::PickleWriter dict;
  dict.empty_dict();
  const auto memo = dict.put();
  dict.mark();
  dict.text("a");
  dict.get(memo);
  dict.text("b");
  dict.get(memo);
  dict.set_items();
  EXPECT_THAT(refusal(std::move(dict).finish()), HasSubstr("nested deeper than 64 levels, or in themselves"));
}

TEST_F(TensorFileTest, SharingThatMultipliesIsRefused) {
  pickle::PickleWriter w;  // 30 levels of {a: x, b: x}
  w.empty_dict();
  for (int i = 0; i < 30; ++i) {
    const auto memo = w.put();
    w.empty_dict();
    w.mark();
    w.text("a");
    w.get(memo);
    w.text("b");
    w.get(memo);
    w.set_items();
  }
  EXPECT_FALSE(open(torch_archive::object_item(std::move(w).finish())));
}

TEST_F(TensorFileTest, NamesThatComeTwiceAreRefused) {
  pickle::PickleWriter w;
  w.empty_dict();
  w.mark();
  w.text("a.b");
  w.integer(1);
  w.text("a");
  w.empty_dict();
  w.mark();
  w.text("b");
  w.integer(2);
  w.set_items();
  w.set_items();
  EXPECT_THAT(refusal(std::move(w).finish()), HasSubstr("'a.b': the name occurs twice"));
}

TEST_F(TensorFileTest, EveryTruncationOfThePickleIsAnError) {
  const File file = *File::open(kData + "mixed.pt");
  const auto archive = zip::Archive::open(file, 0, *file.size());
  ASSERT_TRUE(archive) << archive.error().message();
  const std::string pickle = *archive->read(*archive->find("mixed/data.pkl"), 1 << 20);
  const File cut = *File::create_anonymous(directory_.path());
  const auto opens = [&](std::string_view data) {
    zip::Builder b(0);
    b.add("mixed/data.pkl", data);
    for (const zip::Entry& e : archive->entries())
      if (e.name != "mixed/data.pkl") b.add(e.name, *archive->read(e, 1 << 20));
    const std::string bytes = std::move(b).finish().before;
    EXPECT_TRUE(cut.set_length(static_cast<Index>(bytes.size())) && cut.write_at(0, as_bytes(bytes)));
    return TensorFile::open(cut).has_value();
  };
  EXPECT_TRUE(opens(pickle));
  for (std::size_t n = 0; n < pickle.size(); ++n) EXPECT_FALSE(opens(std::string_view(pickle).substr(0, n))) << n;
}

// With any byte flipped, the file is refused or every tensor is inside it.
TEST_F(TensorFileTest, EveryFlippedByteIsReadOrRefused) {
  for (const char* name : {"mixed.pt", "mixed_legacy.pt"}) {
    const std::string whole = *read_whole_file(kData + name, 1 << 20);
    const auto size = static_cast<Index>(whole.size());
    const File file = *File::create_anonymous(directory_.path());
    ASSERT_TRUE(file.write_at(0, as_bytes(whole)));
    int refused = 0;
    const int step = every_nth(5);
    for (std::size_t i = 0; i < whole.size(); i += static_cast<std::size_t>(step)) {
      const std::string one(1, static_cast<char>(whole[i] ^ (1 << i % 8)));
      ASSERT_TRUE(file.write_at(static_cast<Index>(i), as_bytes(one)));
      const auto read = TensorFile::open(file);
      if (!read) {
        ++refused;
        EXPECT_LT(read.error().message().size(), 2000u);
      } else {
        for (const TensorFile::Entry& e : read->tensors())
          ASSERT_TRUE(fits_inside(e.tensor.extent.offset, e.tensor.extent.length, size)) << name << " " << i;
      }
      ASSERT_TRUE(file.write_at(static_cast<Index>(i), as_bytes(whole.substr(i, 1))));
    }
    EXPECT_GT(refused * step, 500) << name;
  }
}

}  // namespace
}  // namespace reshard::tensor_file_test
