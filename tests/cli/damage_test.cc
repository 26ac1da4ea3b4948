// Tests the program on damaged checkpoints: its exit codes and messages. After an error nothing may be left at the
// destination or next to it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zstd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "formats/encoding/pickle_writer.h"
#include "formats/open.h"
#include "tests/cli/conversions.h"
#include "tests/support/checkpoints.h"
#include "tests/support/dcp_metadata.h"
#include "tests/support/expect_run.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::damage_test {
namespace {

using namespace conversions;
using testing::AllOf;
using testing::HasSubstr;

// ---- damaged data files

TEST(Cli, DamagedDataFilesAreNamed) {
  const auto expect = [](auto damage, int code, const std::vector<std::string>& texts) {  // regular expressions
    const Copy copy("tp8");
    damage(copy);
    std::vector<testing::Matcher<std::string>> matchers;
    for (const std::string& t : texts) matchers.push_back(testing::ContainsRegex(t));
    expect_failure(copy.checkpoint, copy.out, {"--to", "hf"}, code, testing::AllOfArray(matchers));
    expect_failure(copy.checkpoint, copy.out, {"--to", "dcp", "--mesh", "tp=2"}, code, testing::AllOfArray(matchers));
    // verify reports the same fault as a finding.
    const CommandResult r = reshard_cli({"verify", copy.checkpoint});
    EXPECT_EQ(r.exit_code, 1);
    EXPECT_EQ(r.err, "");
    EXPECT_THAT(r.out, AllOf(HasSubstr("error     "), HasSubstr(texts[0])));
  };
  const std::string file = "__3_0.distcp";
  expect([&](const Copy& c) { fs::remove(c.file(file)); }, 5, {file, "missing"});
  expect([&](const Copy& c) { fs::resize_file(c.file(file), 40'000); }, 3,
         {file, "layers.1.attention_norm.weight", "file has 40,000", "truncated"});
  expect([&](const Copy& c) { fs::resize_file(c.file(file), 0); }, 3, {file});
  // A file was overwritten by another one of the same length.
  expect([&](const Copy& c) { write_file(c.file(file), std::string(fs::file_size(c.file(file)), 'x')); }, 3,
         {file, "stale"});
  // Two ranks' files were exchanged: rank 7 holds fewer rows of the vocabulary, so the sizes differ.
  expect(
      [&](const Copy& c) {
        fs::rename(c.file("__0_0.distcp"), c.file("x"));
        fs::rename(c.file("__7_0.distcp"), c.file("__0_0.distcp"));
        fs::rename(c.file("x"), c.file("__7_0.distcp"));
      },
      3, {".distcp"});
  // One bit of one element was flipped.
  expect(
      [&](const Copy& c) {
        std::string bytes = read_file(c.file(file));
        const std::string weight =
            load_checkpoint(sample("tp8") + "/full.safetensors").at("layers.0.feed_forward.w1.weight").bytes;
        const std::size_t at = bytes.find(weight.substr(3 * 22 * 64 * 2, 64));  // rank 3 holds rows 66 to 87
        ASSERT_NE(at, std::string::npos);
        bytes[at + 5] ^= 0x10;
        write_file(c.file(file), bytes);
      },
      3,
      {file, "layers.0.(feed_forward.w1|mlp.gate_proj).weight", "CRC-32 [0-9a-f]+, got",
       "changed after they were saved"});
}

TEST(Cli, EqualSizedSwappedFilesCannotBeToldApart) {
  // If two ranks' files have the same sizes and shapes at the same offsets, no byte of the checkpoint tells which rank
  // wrote which, so no reader can notice an exchange.
  const Copy copy("tp8");
  const std::string a = copy.file("__3_0.distcp"), b = copy.file("__4_0.distcp");
  ASSERT_EQ(fs::file_size(a), fs::file_size(b));
  const std::string bytes_a = read_file(a), bytes_b = read_file(b);
  write_file(a, bytes_b);
  write_file(b, bytes_a);
  expect_success(convert(copy.checkpoint, copy.out, {"--to", "hf"}));
  // It takes a second copy to find it.
  EXPECT_EQ(reshard_cli({"verify", copy.out, "--against", sample("tp8") + "/hf.safetensors"}).exit_code, 1);
}

TEST(Cli, DamagedObjectsAreNotCarriedOn) {
  const Copy copy("fsdp2_tp2_optim");
  const OpenCheckpoint open = *open_checkpoint(copy.checkpoint);
  const Blob blob = open.reader->catalog().blobs.front();
  const std::string path = open.reader->catalog().file_path(blob.extent.file);
  std::string bytes = read_file(path);
  // One byte of its pickle was changed.
  const std::size_t at = bytes.find("\x80\x02", static_cast<std::size_t>(blob.extent.offset));
  ASSERT_LT(at, static_cast<std::size_t>(blob.extent.offset + blob.extent.length));
  bytes[at + 2] ^= 1;
  write_file(path, bytes);
  expect_failure(copy.checkpoint, copy.out, {"--to", "dcp", "--mesh", "tp=2"}, 3,
                 AllOf(HasSubstr("object '" + blob.name + "'"), HasSubstr("data.pkl': crc: expected")));
  const CommandResult r = reshard_cli({"verify", copy.checkpoint});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_THAT(r.out, HasSubstr("data.pkl': crc: expected"));
  // A Hugging Face model holds no such state.
  expect_success(convert(copy.checkpoint, copy.out, {"--to", "hf"}));
}

TEST(Cli, StaleAndIdleFilesAreNotData) {
  const Copy copy("tp8");
  write_file(copy.file("__8_0.distcp"), read_file(copy.file("__7_0.distcp")));
  write_file(copy.file("__9_0.distcp"), "");
  expect_success(convert(copy.checkpoint, copy.out, {"--to", "hf"}));
  EXPECT_TRUE(load_checkpoint(copy.out) == load_checkpoint(sample("tp8") + "/hf.safetensors"));
}

// ---- damaged metadata

TEST(Cli, WithoutMetadataThereIsNoCheckpoint) {
  const Copy copy("tp8");
  const std::string metadata = read_file(copy.file(".metadata"));
  fs::remove(copy.file(".metadata"));
  expect_failure(copy.checkpoint, copy.out, {"--to", "hf"}, 3,
                 AllOf(HasSubstr(".metadata is missing"), HasSubstr("did not finish")));
  // Complete but not yet renamed: used, with a warning.
  write_file(copy.file(".metadata.tmp"), metadata);
  const CommandResult r = convert(copy.checkpoint, copy.out, {"--to", "hf"});
  expect_success(r);
  EXPECT_THAT(r.out, AllOf(HasSubstr("warning"), HasSubstr(".metadata.tmp is complete")));
  EXPECT_TRUE(load_checkpoint(copy.out) == load_checkpoint(sample("tp8") + "/hf.safetensors"));
  fs::remove_all(copy.out);
  write_file(copy.file(".metadata.tmp"), metadata.substr(0, metadata.size() / 2));
  expect_failure(copy.checkpoint, copy.out, {"--to", "hf"}, 3, HasSubstr(".metadata.tmp"));
  fs::remove(copy.file(".metadata.tmp"));
  fs::create_directory(copy.file(".metadata"));
  expect_failure(copy.checkpoint, copy.out, {"--to", "hf"}, 5, HasSubstr("regular file"));
}

TEST(Cli, PicklesAreNeverExecuted) {
  const Copy copy("tp8");
  const std::string marker = copy.dir / "executed", command = "touch " + marker;
  const std::string healthy = read_file(copy.file(".metadata"));
  for (const std::string global : {"cposix\nsystem\n", "cos\nsystem\n"}) {
    pickle::PickleWriter writer;
    writer.text(command);
    writer.tuple_of_last(1);
    const std::string argument = std::move(writer).finish();
    const std::string call = global + argument.substr(2, argument.size() - 3) + "R";
    // Tried as the whole pickle, and in front of a valid one.
    for (const std::string& bytes : {"\x80\x02" + call + ".", "\x80\x02" + call + "0" + healthy.substr(2)}) {
      write_file(copy.file(".metadata"), bytes);
      const std::string name = global[1] == 'p' ? "posix.system" : "os.system";
      expect_failure(copy.checkpoint, copy.out, {"--to", "hf"}, 3,
                     AllOf(HasSubstr(name), HasSubstr("nothing in it was executed")));
      EXPECT_EQ(reshard_cli({"inspect", copy.checkpoint}).exit_code, 3);
    }
  }
  EXPECT_FALSE(fs::exists(marker));
}

// Checkpoints with one float32 tensor "w" of [4, 4], with the given boxes and items.
class Crafted {
 public:
  struct Stored {
    Box box;
    std::string file = "__0_0.distcp";
    Index offset = -1, length = -1;  // -1: unchanged
  };
  Crafted() { fs::create_directory(path()); }
  std::string path() const { return dir_ / "ck"; }
  std::string out() const { return dir_ / "out"; }

  void write(const Dims& shape, std::vector<Stored> stored) {
    std::map<std::string, std::string> files;
    std::vector<std::string> names;
    dcp::WrittenEntry entry;
    const TargetTensor tensor{"w", DType::kFloat32, shape, {"w"}, {}};
    entry.tensor = &tensor;
    entry.name = "w";
    entry.path = {"w"};
    for (const Stored& s : stored) {
      if (std::find(names.begin(), names.end(), s.file) == names.end()) names.push_back(s.file);
      dcp::WrittenItem item{s.box,
                            static_cast<std::uint32_t>(std::find(names.begin(), names.end(), s.file) - names.begin()),
                            s.offset, s.length};
      if (s.length < 0) {
        std::string& bytes = files[s.file];
        item.offset = s.offset < 0 ? static_cast<Index>(bytes.size()) : s.offset;
        const std::string payload(static_cast<std::size_t>(volume(s.box)) * 4, 'v');
        const std::string made = dcp_item(DType::kFloat32, s.box.shape, static_cast<Index>(bytes.size()), payload);
        bytes += made;
        item.length = static_cast<Index>(made.size());
      }
      entry.items.push_back(item);
    }
    for (const auto& [name, bytes] : files)
      if (name.find('/') == std::string::npos) write_file(path() + "/" + name, bytes);
    write_file(path() + "/.metadata", dcp::write_metadata({entry}, names));
  }
  void expect(int code, const testing::Matcher<std::string>& message) const {
    expect_failure(path(), out(), {"--to", "dcp"}, code, message);
    EXPECT_EQ(reshard_cli({"verify", path()}).exit_code, code);
  }
  // Expects a finding from verify, which can open the checkpoint nevertheless.
  void expect_finding(const testing::Matcher<std::string>& message) const {
    expect_failure(path(), out(), {"--to", "dcp"}, 3, message);
    const CommandResult r = reshard_cli({"verify", path()});
    EXPECT_EQ(r.exit_code, 1) << r.err;
    EXPECT_THAT(r.out, HasSubstr("\nerror     "));
  }

 private:
  TempDir dir_;
};

TEST(Cli, BoxesMustTileTheirTensor) {
  Crafted ck;
  ck.write({4, 4}, {{{{0, 0}, {2, 4}}}, {{{2, 0}, {2, 4}}}});
  expect_success(convert(ck.path(), ck.out(), {"--to", "dcp"}));
  fs::remove_all(ck.out());
  ck.write({4, 4}, {{{{0, 0}, {2, 4}}}, {{{1, 0}, {3, 4}}}});
  ck.expect_finding(HasSubstr("'w' [0:2, 0:4] overlaps [1:4, 0:4]"));
  ck.write({4, 4}, {{{{0, 0}, {2, 4}}}, {{{3, 0}, {1, 4}}}});
  ck.expect_finding(HasSubstr("'w' [4, 4]: 4 of 16 elements are missing, the first in [2:3, 0:4]"));
  ck.write({4, 4}, {{{{0, 0}, {2, 4}}}, {{{2, 0}, {3, 4}}}});
  ck.expect(3, AllOf(HasSubstr("'w'"), HasSubstr("outside the tensor's size [4, 4]")));
}

TEST(Cli, TwoBoxesMustNotShareAnItem) {
  Crafted ck;
  const Index length = static_cast<Index>(dcp_item(DType::kFloat32, {2, 4}, 0, std::string(32, 'v')).size());
  ck.write({4, 4}, {{{{0, 0}, {2, 4}}}, {{{2, 0}, {2, 4}}, "__0_0.distcp", 0, length}});
  ck.expect_finding(AllOf(HasSubstr("'w'"), HasSubstr("__0_0.distcp")));
}

TEST(Cli, PathsStayInsideTheCheckpoint) {
  for (const std::string bad : {"../secret.distcp", "/etc/passwd", "a/../../secret", "..", "a\\b", ""}) {
    Crafted ck;
    ck.write({4, 4}, {{{{0, 0}, {4, 4}}, bad, 0, 100}});
    ck.expect(3, AllOf(HasSubstr("relative_path '"), HasSubstr("leaves the checkpoint's directory")));
  }
}

TEST(Cli, AbsurdNumbersAreRefusedWithoutAllocating) {
  constexpr Index kHuge = Index{1} << 62;
  const auto expect = [](const Dims& shape, const Crafted::Stored& stored, const std::string& text) {
    Crafted ck;
    write_file(ck.path() + "/__0_0.distcp", std::string(100, 'x'));
    ck.write(shape, {stored});
    if (text == "__0_0.distcp")  // plausible numbers that exceed the file's length
      ck.expect_finding(HasSubstr(text));
    else
      ck.expect(3, HasSubstr(text));
  };
  expect({kHuge, kHuge}, {{{0, 0}, {kHuge, kHuge}}, "__0_0.distcp", 0, 100}, "overflows");
  expect({kHuge}, {{{0}, {kHuge}}, "__0_0.distcp", 0, 100}, "overflows");
  expect({Index{1} << 60}, {{{0}, {Index{1} << 60}}, "__0_0.distcp", 0, 100}, "__0_0.distcp");
  expect({4, 4}, {{{0, 0}, {4, 4}}, "__0_0.distcp", INT64_MAX - 10, 5}, "__0_0.distcp");
  expect({4, 4}, {{{0, 0}, {4, 4}}, "__0_0.distcp", INT64_MAX - 10, 100}, "_StorageInfo");
  expect({4, 4}, {{{0, 0}, {4, 4}}, "__0_0.distcp", 0, INT64_MAX}, "__0_0.distcp");
}

TEST(Cli, AZstdBombEndsAtTheLimit) {
  // A frame of a few dozen kilobytes decodes to 512 MiB of zeros instead of the expected 64 bytes.
  Crafted ck;
  std::string frame;
  ZSTD_CCtx* context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, 1);
  const std::string zeros(std::size_t{1} << 20, '\0');
  std::string buffer(std::size_t{1} << 20, '\0');
  for (int i = 0; i < 512; ++i) {
    ZSTD_inBuffer in{zeros.data(), zeros.size(), 0};
    for (bool more = true; more;) {
      ZSTD_outBuffer out{buffer.data(), buffer.size(), 0};
      const std::size_t left = ZSTD_compressStream2(context, &out, &in, i == 511 ? ZSTD_e_end : ZSTD_e_continue);
      frame.append(buffer, 0, out.pos);
      more = i == 511 ? left > 0 : in.pos < in.size;
    }
  }
  ZSTD_freeCCtx(context);
  ck.write({4, 4}, {{{{0, 0}, {4, 4}}, "__0_0.distcp", 0, static_cast<Index>(frame.size())}});
  write_file(ck.path() + "/__0_0.distcp", frame);
  const auto start = std::chrono::steady_clock::now();
  ck.expect_finding(AllOf(HasSubstr("'w'"), HasSubstr("__0_0.distcp")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(Cli, RanksThatSavedOnTheirOwnAreJoined) {
  // The content of __R.metadata with use_collectives=False: the rank's boxes, but the sizes of whole tensors.
  const TempDir dir;
  const TensorValues values = load_checkpoint(sample("tp8") + "/full.safetensors");
  write_dcp(values, dir / "ck", Mesh({{"dp_shard", 3}}));
  const auto reader = std::move(open_checkpoint(dir / "ck")->reader);
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    std::vector<TargetTensor> tensors;
    std::vector<dcp::WrittenEntry> entries;
    tensors.reserve(values.size());
    for (const Tensor& t : reader->catalog().tensors()) {
      dcp::WrittenEntry entry;
      entry.name = t.name;
      for (std::size_t i = 0; i < t.fragments.size(); ++i) {
        const Extent e = t.fragments.extent(i);
        if (reader->catalog().files[e.file].path == "__" + std::to_string(rank) + "_0.distcp")
          entry.items.push_back({t.fragments.box(i), e.file, e.offset, e.length});
      }
      if (entry.items.empty()) continue;
      tensors.push_back({t.name, t.dtype, t.shape, {}, {}});
      entry.tensor = &tensors.back();
      entries.push_back(std::move(entry));
    }
    std::vector<std::string> names;
    for (const CatalogFile& f : reader->catalog().files) names.push_back(f.path);
    write_file(dir / ("ck/__" + std::to_string(rank) + ".metadata"), dcp::write_metadata(entries, names));
  }
  fs::remove(dir / "ck/.metadata");
  EXPECT_TRUE(load_checkpoint(dir / "ck") == values);
  expect_success(convert(dir / "ck", dir / "out", {"--to", "dcp", "--mesh", "tp=2"}));
  EXPECT_TRUE(load_checkpoint(dir / "out") == values);
  // If one of them is lost, verify names the missing box.
  fs::remove(dir / "ck/__1.metadata");
  expect_failure(dir / "ck", dir / "none", {"--to", "dcp"}, 3, AllOf(HasSubstr("tensor '"), HasSubstr("[")));
}

// ---- damaged safetensors

TEST(Cli, DamagedHuggingFaceModelsAreRefused) {
  const TempDir dir;
  expect_success(convert(sample("tp8") + "/checkpoint", dir / "hf", {"--to", "hf", "--max-shard-size", "200kB"}));
  const std::string index_path = dir / "hf/model.safetensors.index.json", index = read_file(index_path);
  const std::string shard = "model-00001-of-00003.safetensors";
  ASSERT_TRUE(fs::exists(dir / ("hf/" + shard)));
  const std::vector<std::string> to = {"--to", "dcp", "--names", "torchtitan"};
  for (const std::string bad : {"../outside.safetensors", "/etc/passwd"}) {
    std::string changed = index;
    changed.replace(changed.find(shard), shard.size(), bad);
    write_file(index_path, changed);
    expect_failure(dir / "hf", dir / "out", to, 3, AllOf(HasSubstr(bad), HasSubstr("index.json")));
  }
  std::string changed = index;
  changed.replace(changed.find(shard), shard.size(), "model-00009-of-00003.safetensors");
  write_file(index_path, changed);
  expect_failure(dir / "hf", dir / "out", to, 5, HasSubstr("model-00009-of-00003.safetensors"));
  write_file(index_path, index);
  const std::string bytes = read_file(dir / ("hf/" + shard));
  write_file(dir / ("hf/" + shard), bytes.substr(0, bytes.size() - 1));
  expect_failure(dir / "hf", dir / "out", to, 3, HasSubstr(shard));
  fs::remove(dir / ("hf/" + shard));
  expect_failure(dir / "hf", dir / "out", to, 5, HasSubstr(shard));
  // Safetensors has no checksums; the manifest does.
  std::string flipped = bytes;
  flipped[bytes.size() - 10] ^= 4;
  write_file(dir / ("hf/" + shard), flipped);
  const CommandResult r = reshard_cli({"verify", dir / "hf"});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_THAT(r.out, HasSubstr("the digest differs from reshard_manifest.json"));
}

}  // namespace
}  // namespace reshard::damage_test
