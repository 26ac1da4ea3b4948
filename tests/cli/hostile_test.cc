// Input and surroundings that no care of the user's keeps away: names made to break what prints them, sizes made to
// overflow, a system that gives no threads. The program says what is wrong, or does without.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zstd.h>

#include <filesystem>

#include "formats/dcp/metadata.h"
#include "tests/support/checkpoints.h"
#include "tests/support/dcp_metadata.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// A safetensors file of empty tensors; the names as JSON has them.
std::string empty_tensors(const std::vector<std::string>& names) {
  std::string header;
  for (const std::string& name : names)
    header += (header.empty() ? "{\"" : ",\"") + name + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  header += "}";
  std::string length(8, '\0');
  for (int i = 0; i < 8; ++i) length[static_cast<std::size_t>(i)] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return length + header;
}

TEST(Hostile, NamesThatFoldOddly) {
  const TempDir dir;
  const std::vector<std::vector<std::string>> lists = {{".", ".."},        {"\\u0001", "5"},      {"\\u0001.5", "5.5"},
                                                       {"", ".", "1", ""}, {"...1", "...2", "."}, {"1..1", "1.1", "1"}};
  for (std::vector<std::string> names : lists) {
    if (names.back().empty()) names.pop_back();
    SCOPED_TRACE(names.front());
    dir.write("model.safetensors", empty_tensors(names));
    for (const std::string command : {"inspect", "verify"}) {
      const CommandResult r = reshard_cli({command, dir / "model.safetensors"});
      EXPECT_EQ(r.exit_code, 0) << r.err;
    }
    // A layout file cannot say every name, but never dies of one.
    EXPECT_LE(reshard_cli({"layout", dir / "model.safetensors"}).exit_code, 3);
  }
  dir.write("model.safetensors", empty_tensors({".", "..", "a.0", "a.1", "\\u0001", "5"}));
  const std::string out = reshard_cli({"inspect", dir / "model.safetensors"}).out;
  for (const char* line : {"\n.  ", "\n..  ", "\n\\x01  ", "\n5  ", "\na.{0..1}  "}) EXPECT_THAT(out, HasSubstr(line));
}

TEST(Hostile, SlowPatternsOfADumpAreRefused) {
  const TempDir dir;
  const std::string name(300'000, 'a');
  for (const char* rank : {"rank_0.safetensors", "rank_1.safetensors"}) dir.write(rank, empty_tensors({name}));
  std::string ranges = "*{1";
  for (int i = 0; i < 60'000; ++i) ranges += ",1";
  for (const std::string& pattern : {"*" + std::string(120'000, 'a') + "b", ranges + "}b"}) {
    dir.write("reshard_layout.json", R"({"reshard_layout": 1, "name": "x", "mesh": [{"axis": "tp", "size": 2}],
      "files": "shards", "tensors": [{"names": [")" +
                                         pattern + R"("], "splits": []}]})");
    const CommandResult r = reshard_cli({"inspect", dir.path()});
    EXPECT_EQ(r.exit_code, 4) << r.err;
    EXPECT_THAT(r.err, HasSubstr("the patterns are too long to be held against 1 name of 300 kB"));
  }
}

TEST(Hostile, NamesDoNotSteerTheTerminal) {
  const TempDir dir;
  dir.write("model.safetensors", empty_tensors({"\\u001b]0;pwn\\u0007\\u009b31mC1\\u202eRTL\\u2066x", "caf\xc3\xa9"}));
  for (const std::string command : {"inspect", "verify", "layout"}) {
    const CommandResult r = reshard_cli({command, dir / "model.safetensors"});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    for (const char* raw : {"\x1b]", "\x07", "\xc2\x9b", "\xe2\x80\xae", "\xe2\x81\xa6"})
      if (command != "layout") {
        EXPECT_THAT(r.out + r.err, Not(HasSubstr(raw))) << command;
      }
  }
  EXPECT_THAT(reshard_cli({"inspect", dir / "model.safetensors"}).out, HasSubstr("caf\xc3\xa9"));
}

TEST(Hostile, SizesBehindCompressionDoNotOverflow) {
  const TempDir dir;
  const TargetTensor tensor{"w", DType::kUint8, {Index{1} << 62}, {"w"}, {}};
  dcp::WrittenEntry entry{&tensor, "w", {"w"}, {}};
  std::string frame(ZSTD_compressBound(1000), '\0');
  frame.resize(ZSTD_compress(frame.data(), frame.size(), std::string(1000, 'x').data(), 1000, 1));
  entry.items.push_back({Box{{0}, {Index{1} << 62}}, 0, 0, static_cast<Index>(frame.size())});
  dir.write("ck/__0_0.distcp", frame);
  dir.write("ck/.metadata", dcp::write_metadata({entry}, {"__0_0.distcp"}));
  const CommandResult r = reshard_cli({"convert", dir / "ck", dir / "out", "--to", "dcp"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, AllOf(HasSubstr("expected a torch.save archive"), Not(HasSubstr("at most -"))));
}

TEST(Hostile, ASmallObjectDoesNotDecodeToMuch) {
  const TempDir dir;
  const std::string zeros(std::size_t{17} << 20, '\0');
  std::string frame(ZSTD_compressBound(zeros.size()), '\0');
  frame.resize(ZSTD_compress(frame.data(), frame.size(), zeros.data(), zeros.size(), 1));
  dcp::WrittenEntry entry{nullptr, "seed", {"seed"}, {}};
  entry.items.push_back({Box{}, 0, 0, static_cast<Index>(frame.size())});
  dir.write("ck/__0_0.distcp", frame);
  dir.write("ck/.metadata", dcp::write_metadata({entry}, {"__0_0.distcp"}));
  const CommandResult r = reshard_cli({"verify", dir / "ck"});
  EXPECT_EQ(r.exit_code, 1) << r.out << r.err;
  EXPECT_THAT(r.out, HasSubstr("expected at most 16777216 bytes"));
}

// HDF5: 2,000 links to one dataset below six groups of 4,000 letters.
TEST(Hostile, LongPathsAreInProportionToTheFile) {
  const CommandResult r = reshard_cli({"inspect", test_data("hdf5") + "/long_paths.h5"});
  EXPECT_EQ(r.exit_code, 3) << r.out;
  EXPECT_THAT(r.err, HasSubstr("long_paths.h5: the paths and names of its objects are more than 16 times the file"));
  EXPECT_LT(r.err.size(), 1000u);
}

TEST(Hostile, FewerThreadsThanAskedForDoTheSame) {
  const TempDir dir;
  const std::string source = sample("fsdp2_tp2_optim") + "/checkpoint";
  const auto run = [&](const std::vector<std::string>& args, const std::string& threads) {
    std::vector<std::string> argv = {RESHARD_BINARY};
    argv.insert(argv.end(), args.begin(), args.end());
    // AddressSanitizer wants to be the first library, and is the second of those that start threads.
    return run_command(
        argv, 60,
        {"LD_PRELOAD=" RESHARD_THREAD_FAULT, "RESHARD_THREADS=" + threads, "ASAN_OPTIONS=verify_asan_link_order=0"});
  };
  ASSERT_EQ(reshard_cli({"convert", source, dir / "all", "--to", "dcp", "--mesh", "tp=4"}).exit_code, 0);
  for (const std::string threads : {"0", "1", "3"}) {
    const std::string out = dir / ("out" + threads);
    CommandResult r = run({"convert", source, out, "--to", "dcp", "--mesh", "tp=4", "--threads", "8"}, threads);
    EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
    EXPECT_TRUE(all_files(out) == all_files(dir / "all"));
    EXPECT_FALSE(fs::exists(out + ".partial"));
    r = run({"verify", source, "--against", out, "--threads", "8"}, threads);
    EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
  }
}

}  // namespace
}  // namespace reshard
