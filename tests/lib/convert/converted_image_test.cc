// Tests reading a conversion's output in pieces: every file that convert writes, bit for bit, in any order.
#include "lib/convert/converted_image.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <thread>

#include "formats/open.h"
#include "lib/model/config.h"
#include "lib/source/pieces.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::converted_image_test {
namespace {

using testing::HasSubstr;

struct Case {
  std::string name, source, config, to;
  std::string mesh = {};
  std::string names = {};
  std::string dtype = {};
  Container container = Container::kSafetensors;
  bool merge = false;
};

std::string case_name(const testing::TestParamInfo<Case>& tested) {
  std::string name = tested.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// A source and its conversion, which must outlive the images made from them.
struct Prepared {
  OpenCheckpoint source;
  std::unique_ptr<Conversion> conversion;
};

Result<std::unique_ptr<Prepared>> prepare(const Case& c, Index memory = Index{512} << 20, bool metadata_only = false) {
  auto out = std::make_unique<Prepared>();
  OpenOptions how;
  how.files_too = !metadata_only;
  out->source = TRY(open_checkpoint(c.source, how));
  const Format* format = TRY(find_format(c.to));
  ConversionOptions o;
  o.source_path = c.source;
  o.config_path = c.config;
  if (!c.mesh.empty()) o.placement.mesh = TRY(Mesh::parse(c.mesh));
  if (!c.names.empty()) o.naming.convention = find_convention(c.names);
  if (!c.dtype.empty()) o.typing.dtype = dtype_from_torch(c.dtype);
  o.container = c.container;
  o.selection.merge_adapter = c.merge;
  o.metadata_only = metadata_only;
  o.max_file_bytes = 100'000;  // so that there are several files
  o.run.memory = memory;
  o.run.threads = 3;
  out->conversion = TRY(Conversion::prepare(*out->source.reader, *format, std::move(o)));
  return out;
}

std::string read(Image& image, std::uint32_t file, Index offset, Index length) {
  std::string out;
  const auto parts = image.read(file, offset, length);
  EXPECT_TRUE(parts) << (parts ? "" : parts.error().message());
  if (parts)
    for (const Image::Part& part : *parts) out += as_string(part.bytes);
  return out;
}

class ConvertedImages : public testing::TestWithParam<Case> {};

TEST_P(ConvertedImages, HaveTheBytesThatConvertWrites) {
  const TempDir dir;
  const std::string written = dir / "written";
  const auto writing = prepare(GetParam());
  ASSERT_TRUE(writing) << writing.error().message();
  const auto outcome = (*writing)->conversion->run({written});
  ASSERT_TRUE(outcome) << outcome.error().message();
  std::map<std::string, std::string> expected;
  if (std::filesystem::is_directory(written))
    expected = all_files(written);
  else
    expected[(*writing)->conversion->target().catalog().files[0].path] = read_file(written);

  const auto open = [&]() -> std::pair<std::unique_ptr<Prepared>, std::unique_ptr<ConvertedImage>> {
    auto prepared = prepare(GetParam());
    EXPECT_TRUE(prepared);
    auto opened = ConvertedImage::open(*(*prepared)->conversion, true);
    EXPECT_TRUE(opened) << (opened ? "" : opened.error().message());
    return {*std::move(prepared), *std::move(opened)};
  };
  // Reads in order, in requests of this size.
  for (const Index step : {Index{1} << 20, Index{4096}, Index{777}}) {
    const auto [source, view] = open();
    Image& image = view->image();
    std::map<std::string, std::string> got;
    for (std::uint32_t f = 0; f < image.files().size(); ++f)
      for (Index at = 0; at < image.files()[f].size; at += step) got[image.files()[f].path] += read(image, f, at, step);
    ASSERT_EQ(got.size(), expected.size());
    for (const auto& [path, bytes] : expected) EXPECT_TRUE(got[path] == bytes) << path << " in steps of " << step;
  }
  // Reads backwards, and at random positions on several threads at once.
  const auto [source, view] = open();
  Image& image = view->image();
  const auto check = [&](std::uint32_t f, Index at, Index length) {
    const std::string& bytes = expected[image.files()[f].path];
    const auto begin = static_cast<std::size_t>(at);
    EXPECT_TRUE(read(image, f, at, length) == bytes.substr(begin, static_cast<std::size_t>(length)))
        << image.files()[f].path << " " << at << " " << length;
  };
  for (auto f = static_cast<std::uint32_t>(image.files().size()); f-- > 0;)
    for (Index at = image.files()[f].size; at > 0;) {
      const Index before = std::max<Index>(0, at - 5001);
      check(f, before, at - before);
      at = before;
    }
  const auto [other_source, other_view] = open();
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t)
    threads.emplace_back([&, t, &others = other_view->image()] {
      std::mt19937 random(t);
      for (int i = 0; i < 100; ++i) {
        const auto f = static_cast<std::uint32_t>(random() % others.files().size());
        const std::string& bytes = expected[others.files()[f].path];
        const auto at = static_cast<Index>(random() % bytes.size()), n = static_cast<Index>(random() % 20'000);
        EXPECT_TRUE(read(others, f, at, n) == bytes.substr(static_cast<std::size_t>(at), static_cast<std::size_t>(n)))
            << others.files()[f].path << " " << at << " " << n;
      }
    });
  for (std::thread& t : threads) t.join();
}

TEST_P(ConvertedImages, AreListedFromTheMetadata) {
  const auto planned = prepare(GetParam(), Index{512} << 20, true);
  ASSERT_TRUE(planned) << planned.error().message();
  const auto listing = ConvertedImage::list(*(*planned)->conversion);
  ASSERT_TRUE(listing) << listing.error().message();
  const auto prepared = prepare(GetParam());
  ASSERT_TRUE(prepared) << prepared.error().message();
  const auto view = ConvertedImage::open(*(*prepared)->conversion, false);
  ASSERT_TRUE(view) << view.error().message();
  const auto really = (*view)->listing();
  EXPECT_EQ(listing->files.size(), really.files.size());
  // Megatron's file names contain the number of optimizer steps, which is a value in the data. So metadata alone does
  // not give the listing.
  if ((*find_format(GetParam().to))->holds == StateSupport::kAdam) return;
  EXPECT_EQ(*listing, really);
}

std::vector<Case> cases() {
  const auto of = [](const std::string& name) { return sample(name) + "/checkpoint"; };
  const auto config = [](const std::string& name) { return sample(name) + "/config.json"; };
  const std::string colossalai = sample("colossalai") + "/healthy_st/epoch-0_step-7";
  const std::string lora = test_data("lora");
  std::vector<Case> out;
  for (const char* to :
       {"hf", "bin", "dcp", "colossalai", "ranks", "vllm", "hdf5", "megatron", "torch_checkpointing", "orbax"}) {
    const std::string name = to;
    out.push_back({name + "_of_tp8", of("tp8"), config("tp8"), to});
    out.push_back({name + "_of_colossalai", colossalai, config("colossalai"), to});
    out.push_back({name + "_of_fsdp2_tp2_optim", of("fsdp2_tp2_optim"), config("fsdp2_tp2_optim"), to});
  }
  for (const char* to : {"dcp", "ranks", "megatron", "megatron-legacy", "orbax"})
    out.push_back({std::string(to) + "_on_a_mesh", of("hsdp2x4"), config("hsdp2x4"), to, "dp_shard=3,tp=2"});
  out.push_back({"compressed_chunks", test_data("orbax/two_processes"), "", "dcp", "dp_shard=3"});
  out.push_back({"colossalai_in_stages", of("pp2_tp4"), config("pp2_tp4"), "colossalai", "pp=2"});
  out.push_back({"vllm_on_a_mesh", of("pp2_tp4"), config("pp2_tp4"), "vllm", "tp=2"});
  out.push_back(
      {"ranks_in_archives", of("pp2_tp4"), config("pp2_tp4"), "ranks", "tp=2", "", "", Container::kTorchSave});
  out.push_back({"other_rows", colossalai, config("colossalai"), "dcp", "tp=2", "torchtitan"});
  out.push_back({"plain_optimizer", of("fsdp2_tp2_optim"), config("fsdp2_tp2_optim"), "megatron-legacy-local", "tp=2",
                 "", "bfloat16"});
  out.push_back({"fused", of("tp8"), config("tp8"), "dcp", "tp=2", "megatron"});
  out.push_back({"smaller", of("tp8"), config("tp8"), "hf", "", "", "float8_e4m3fn"});
  out.push_back({"wider", of("tp8"), config("tp8"), "bin", "", "", "float32"});
  out.push_back({"narrower", of("fsdp2_tp2_optim"), config("fsdp2_tp2_optim"), "dcp", "tp=2", "hf", "float16"});
  out.push_back({"adapter_merged", lora, lora + "/config.json", "hf", "", "", "", Container::kSafetensors, true});
  out.push_back({"adapter_beside", lora, lora + "/config.json", "hf"});
  return out;
}
INSTANTIATE_TEST_SUITE_P(Everything, ConvertedImages, testing::ValuesIn(sampled(cases(), 3)), case_name);

Case hf_of(const std::string& checkpoint, const std::string& config) { return {"", checkpoint, config, "hf"}; }

TEST(ConvertedImage, RefusesWhatHasNoLengthYet) {
  const TempDir dir;
  const auto open = open_checkpoint(sample("tp8") + "/checkpoint");
  ASSERT_TRUE(open);
  ConversionOptions o;
  o.compression.zstd_level = 3;
  const auto conversion = Conversion::prepare(*open->reader, **find_format("hdf5"), std::move(o));
  ASSERT_TRUE(conversion) << conversion.error().message();
  const auto image = ConvertedImage::open(**conversion, false);
  ASSERT_FALSE(image);
  EXPECT_THAT(image.error().message(), HasSubstr("drop the compression"));
}

TEST(ConvertedImage, SaysWhatMemoryItNeeds) {
  const auto prepared = prepare(hf_of(sample("tp8") + "/checkpoint", sample("tp8") + "/config.json"), Index{1} << 20);
  ASSERT_TRUE(prepared) << prepared.error().message();
  const auto image = ConvertedImage::open(*(*prepared)->conversion, false);
  ASSERT_FALSE(image);
  EXPECT_THAT(image.error().message(), HasSubstr("is too small; expected at least"));
}

TEST(ConvertedImage, ASourceThatChangesIsAnError) {
  const TempDir dir;
  copy_sample("tp8", dir.path());
  const auto prepared = prepare(hf_of(dir / "checkpoint", dir / "config.json"));
  ASSERT_TRUE(prepared) << prepared.error().message();
  const auto view = ConvertedImage::open(*(*prepared)->conversion, false);
  ASSERT_TRUE(view) << view.error().message();
  EXPECT_TRUE((*view)->unchanged());
  const std::string changed = dir / "checkpoint/__3_0.distcp";
  std::filesystem::last_write_time(changed, std::filesystem::last_write_time(changed) + std::chrono::seconds(1));
  const Status noticed = (*view)->unchanged();
  ASSERT_FALSE(noticed);
  EXPECT_THAT(noticed.error().message(), HasSubstr("__3_0.distcp: the file has changed since it was opened"));
  std::string errors;
  Image& image = (*view)->image();
  for (std::uint32_t f = 0; f < image.files().size(); ++f)
    if (const auto parts = image.read(f, 0, image.files()[f].size); !parts) errors += parts.error().message() + "\n";
  EXPECT_THAT(errors, HasSubstr("tensor '"));
  EXPECT_THAT(errors, HasSubstr("has changed since it was opened"));
}

// Checks any part of the item, repeatedly.
TEST(ConvertedImage, CheckHoldsChecksumsFirst) {
  const TempDir dir;
  copy_sample("tp8", dir.path());
  const std::string file = dir / "checkpoint/__0_0.distcp";
  Extent place;
  {
    const auto open = open_checkpoint(dir / "checkpoint");
    ASSERT_TRUE(open);
    const auto number = open->reader->catalog().find("tok_embeddings.weight");
    ASSERT_TRUE(number);
    ASSERT_TRUE(open->reader->locate({*number}, 1, dir.path()));
    const FragmentList& fragments = open->reader->catalog().tensors()[*number].fragments;
    for (std::size_t i = 0; i < fragments.size(); ++i)
      if (fragments.box(i).begin(0) == 0) place = fragments.extent(i);
    const std::string path = open->reader->catalog().file_path(place.file);
    std::string bytes = read_file(path);
    bytes[static_cast<std::size_t>(place.offset + place.length - 1)] ^= 1;
    write_file(path, bytes);
  }
  const auto prepared = prepare(hf_of(dir / "checkpoint", dir / "config.json"));
  ASSERT_TRUE(prepared) << prepared.error().message();
  const auto view = ConvertedImage::open(*(*prepared)->conversion, true);
  ASSERT_TRUE(view) << view.error().message();
  Image& image = (*view)->image();
  int failed = 0;
  for (int again = 0; again < 2; ++again)
    for (std::uint32_t f = 0; f < image.files().size(); ++f)
      for (Index at = 0; at < image.files()[f].size; at += 512)
        if (const auto parts = image.read(f, at, 512); !parts) {
          ++failed;
          EXPECT_THAT(parts.error().message(), HasSubstr("tensor 'model.embed_tokens.weight'"));
          EXPECT_THAT(parts.error().message(), HasSubstr("expected CRC-32"));
          EXPECT_THAT(parts.error().message(), HasSubstr("@0x"));
        }
  EXPECT_GT(failed, 1);
}

}  // namespace
}  // namespace reshard::converted_image_test
