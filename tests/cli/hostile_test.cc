// Hostile inputs and environments: names that break terminals, sizes that overflow, a system that refuses threads. The
// program reports the problem or does without.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zstd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "formats/dcp/metadata.h"
#include "formats/encoding/torch_archive.h"
#include "tests/support/checkpoints.h"
#include "tests/support/dcp_metadata.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::hostile_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// Returns a safetensors file of empty tensors with these names, which are written as JSON has them.
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
  for (std::vector<std::string> names : sampled(lists, 2)) {
    if (names.back().empty()) names.pop_back();
    SCOPED_TRACE(names.front());
    dir.write("model.safetensors", empty_tensors(names));
    for (const std::string command : {"inspect", "verify"}) {
      const CommandResult r = reshard_cli({command, dir / "model.safetensors"});
      EXPECT_EQ(r.exit_code, 0) << r.err;
    }
    EXPECT_EQ(reshard_cli({"layout", dir / "model.safetensors"}).exit_code, 0);
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
    EXPECT_THAT(r.err, HasSubstr("the patterns are too long to be matched against 1 name of 300 kB"));
  }
}

// Returns characters of every kind that a terminal interprets or does not show, one per string, as UTF-8; the last is
// not UTF-8.
std::vector<std::string> unprintable_texts() {
  std::vector<std::string> out;
  for (char c = 1; c < 0x20; ++c)
    if (c != '\n') out.emplace_back(1, c);
  for (const char* text :
       {"\x7f",         "\xc2\x80",     "\xc2\x85",     "\xc2\x9b",     "\xc2\x9f",         "\xc2\xad",
        "\xd8\x9c",     "\xe1\x85\x9f", "\xe1\xa0\x8e", "\xe2\x80\x8b", "\xe2\x80\x8d",     "\xe2\x80\x8f",
        "\xe2\x80\xa8", "\xe2\x80\xa9", "\xe2\x80\xaa", "\xe2\x80\xae", "\xe2\x81\xa0",     "\xe2\x81\xa6",
        "\xe2\x81\xa9", "\xe3\x85\xa4", "\xef\xb8\x8f", "\xef\xbb\xbf", "\xf3\xa0\x81\x81", "\xff"})
    out.emplace_back(text);
  return out;
}

void expect_printable(const std::string& output, const std::string& what) {
  for (const std::string& text : unprintable_texts()) EXPECT_THAT(output, Not(HasSubstr(text))) << what;
}

TEST(Hostile, ANameMayBeOnlyASuffix) {
  const TempDir dir;
  dir.write("model.safetensors", empty_tensors({"_scale", "._scale", "act._scale", "lm_head.weight._scale", "."}));
  const std::string model = dir / "model.safetensors";
  EXPECT_EQ(reshard_cli({"inspect", model}).exit_code, 0);
  EXPECT_EQ(reshard_cli({"verify", model}).exit_code, 1);  // the integers of two packed weights are missing
  EXPECT_EQ(reshard_cli({"convert", model, dir / "out", "--to", "hf", "--family", "none"}).exit_code, 0);
}

// A shell's word for a path, a file name and a tensor's name each contain all of them.
TEST(Hostile, NamesDoNotSteerTheTerminal) {
  const TempDir dir;
  std::vector<std::string> names = {"caf\xc3\xa9"};
  std::string all;
  for (const std::string& text : unprintable_texts()) {
    all += text;
    if (text == "\xff") continue;
    std::string escaped;
    append_json_string(escaped, "w" + text);
    names.push_back(escaped.substr(1, escaped.size() - 2));
  }
  dir.write("model.safetensors", empty_tensors(names));
  const std::string home = "a" + all, shards = "b" + all;
  dir.write(home + "/model.safetensors", empty_tensors(names));
  dir.write(home + "/config.json", "{\"model_type\": \"\\u001b[2J\\u202e\", \"vocab_size\": \"\\u009b\"}");
  std::string index = "{\"weight_map\": {\"w\": ";
  append_json_string(index, "gone" + all.substr(0, all.size() - 1) + ".safetensors");
  dir.write(shards + "/model.safetensors.index.json", index + "}}");
  const std::string model = dir / "model.safetensors", where = dir / home;
  const std::vector<std::vector<std::string>> commands = {
      {"inspect", model},
      {"inspect", model, "--json"},
      {"inspect", where, "--filter", all},
      {"inspect", where, "--html", dir / "page.html"},
      {"inspect", dir / shards},
      {"inspect", where + "/gone"},
      {"verify", model},
      {"verify", where, "--json", "--values"},
      {"verify", where, "--junit", dir / "junit.xml"},
      {"verify", model, "--against", dir / shards},
      {"diff", model, where},
      {"diff", model, where, "--json"},
      {"plan", where, "--to", "dcp", "--family", "none", "--json"},
      {"plan", where, "--to", all},
      {"convert", where, dir / "out", "--to", "hf"},
      {"convert", where, dir / ("out" + all), "--to", "dcp", "--family", "none"},
      {"convert", where, dir / (all + "/" + all), "--to", "dcp"},
      {"merge", model, where, dir / "merged", "--average", "--to", "dcp", "--family", "none", "--expression", all},
      {"check", "--config", where + "/config.json", "--mesh", "tp=2"},
      {"check", "--config", where + "/config.json", "--mesh", all},
      {"latest", where},
      {"layout", model},
      {all},
      {"inspect", "--" + all},
  };
  for (const std::vector<std::string>& command : sampled(commands, 3)) {
    const CommandResult r = reshard_cli(command);
    EXPECT_NE(r.exit_code, 70) << r.err;
    expect_printable(r.out + r.err, testing::PrintToString(command));
  }
  expect_printable(read_file(dir / "junit.xml"), "JUnit");
  expect_printable(read_file(dir / "page.html"), "HTML");
  EXPECT_THAT(reshard_cli({"inspect", model}).out, HasSubstr("caf\xc3\xa9"));
}

std::string zstd_frame(const std::string& bytes) {
  std::string frame(ZSTD_compressBound(bytes.size()), '\0');
  frame.resize(ZSTD_compress(frame.data(), frame.size(), bytes.data(), bytes.size(), 1));
  return frame;
}

TEST(Hostile, SizesBehindCompressionDoNotOverflow) {
  const TempDir dir;
  const TargetTensor tensor{"w", DType::kUint8, {Index{1} << 62}, {"w"}, {}};
  dcp::WrittenEntry entry{&tensor, "w", {"w"}, {}};
  const std::string frame = zstd_frame(std::string(1000, 'x'));
  entry.items.push_back({Box{{0}, {Index{1} << 62}}, 0, 0, static_cast<Index>(frame.size())});
  dir.write("ck/__0_0.distcp", frame);
  dir.write("ck/.metadata", dcp::write_metadata({entry}, {"__0_0.distcp"}));
  const CommandResult r = reshard_cli({"convert", dir / "ck", dir / "out", "--to", "dcp"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, AllOf(HasSubstr("expected a torch.save archive"), Not(HasSubstr("at most -"))));
}

// Writes a DCP checkpoint with the tensor "w" and the object "state.seed", stored as these bytes.
void write_with_object(const std::string& path, const std::string& object, const KeyPath& key = {"state", "seed"}) {
  const TargetTensor w{"w", DType::kUint8, {4}, {"w"}, {}};
  const std::string item = dcp_item(DType::kUint8, {4}, 0, "abcd");
  dcp::WrittenEntry tensor{&w, "w", {"w"}, {}}, blob{nullptr, "state.seed", key, {}};
  tensor.items.push_back({Box{{0}, {4}}, 0, 0, std::ssize(item)});
  blob.items.push_back({Box{}, 0, std::ssize(item), std::ssize(object)});
  fs::create_directories(path);
  write_file(path + "/__0_0.distcp", item + object);
  write_file(path + "/.metadata", dcp::write_metadata({tensor, blob}, {"__0_0.distcp"}));
}

// Returns an object that torch.load creates by calling this function.
std::string calling(std::string_view module, std::string_view name) {
  pickle::PickleWriter w;
  w.global(module, name);
  w.text("true");
  w.tuple_of_last(1);
  w.reduce();
  return torch_archive::object_item(std::move(w).finish());
}

// Loaders of DCP execute the globals that an object's pickle references, so an object that references more than plain
// data is not copied.
TEST(Hostile, ObjectsThatRunCodeAreNotWrittenOn) {
  const TempDir dir;
  const std::string ck = dir / "ck", out = dir / "out";
  const auto convert = [&](const std::string& source, const std::string& to,
                           const std::vector<std::string>& more = {}) {
    fs::remove_all(out);
    return reshard_cli({"convert", source, out, "--to", to}, more);
  };
  const auto expect_refused = [&](const std::string& source, const std::string& to, const std::string& name) {
    const CommandResult r = convert(source, to);
    EXPECT_EQ(r.exit_code, 4) << name << r.out << r.err;
    EXPECT_THAT(
        r.err, HasSubstr("object 'state.seed': its pickle names '" + name + "', which runs when the object is loaded"));
    EXPECT_FALSE(fs::exists(out) || fs::exists(out + ".partial"));
  };
  // Functions can be reached through the imports of a module.
  const std::pair<const char*, const char*> kCalls[] = {{"os", "system"},
                                                        {"builtins", "eval"},
                                                        {"builtins", "getattr"},
                                                        {"torch.serialization", "os.system"},
                                                        {"torch.storage", "_load_from_bytes"},
                                                        {"megatron.core.utils", "subprocess.Popen"},
                                                        {"torch", "load"},
                                                        {"my.trainer", "State"}};
  for (const auto& [module, name] : sampled(kCalls, 3)) {
    const std::string object = calling(module, name), global = std::string(module) + "." + name;
    for (const std::string& stored : {object, zstd_frame(object)}) {
      write_with_object(ck, stored);
      for (const char* to : {"dcp", "hdf5"}) expect_refused(ck, to, global);
    }
  }
  const CommandResult without = convert(ck, "dcp", {"--exclude", "state.seed"});
  EXPECT_EQ(without.exit_code, 0) << without.err;
  // With --allow objects it is copied unchanged; in an archive it is still not trusted.
  const std::string object = calling("os", "system");
  write_with_object(ck, object);
  const CommandResult all = convert(ck, "dcp", {"--allow", "objects"});
  ASSERT_EQ(all.exit_code, 0) << all.err;
  EXPECT_THAT(read_file(out + "/__0_0.distcp"), HasSubstr(object));
  ASSERT_EQ(convert(ck, "hdf5", {"--allow", "objects"}).exit_code, 0);
  fs::rename(out, dir / "ck.h5");
  expect_refused(dir / "ck.h5", "dcp", "os.system");
  // Plain data that trainers store.
  for (const auto& [module, name] :
       std::vector<std::pair<const char*, const char*>>{{"argparse", "Namespace"},
                                                        {"megatron.core.enums", "ModelType"},
                                                        {"torch", "bfloat16"},
                                                        {"numpy", "dtype"}}) {
    write_with_object(ck, calling(module, name));
    const CommandResult r = convert(ck, "dcp");
    EXPECT_EQ(r.exit_code, 0) << r.err;
  }
}

TEST(Hostile, APathThatIsNotTheNamesIsWarnedOf) {
  const TempDir dir;
  pickle::PickleWriter w;
  w.integer(7);
  const std::string object = torch_archive::object_item(std::move(w).finish());
  write_with_object(dir / "ck", object, {"state", "other"});
  const CommandResult r = reshard_cli({"convert", dir / "ck", dir / "out", "--to", "dcp"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("1 name is different from the path in the nested state_dict ('state.seed')"));
  write_with_object(dir / "ck", object);
  EXPECT_THAT(reshard_cli({"convert", dir / "ck", dir / "out2", "--to", "dcp"}).out, Not(HasSubstr("nested")));
}

// The process in which libhdf5 examines a file first ends with the process that started it.
TEST(Hostile, AKilledProcessLeavesNoneOfHdf5Behind) {
  if (!fs::exists("/proc/self/task/" + std::to_string(::getpid()) + "/children")) GTEST_SKIP() << "no list of children";
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);  // orphans become children of this process
  bool was_killed = false;
  for (int round = 0; round < 50 && !was_killed; ++round) {  // the child may have ended already, or not begun yet
    const pid_t parent = ::fork();
    if (parent == 0) {
      const int nowhere = ::open("/dev/null", O_WRONLY);
      ::dup2(nowhere, 1);
      ::dup2(nowhere, 2);
      ::execl(RESHARD_BINARY, RESHARD_BINARY, "inspect", (test_data("hdf5") + "/long_paths.h5").c_str(), nullptr);
      ::_exit(127);
    }
    const std::string list = "/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) + "/children";
    pid_t child = 0;
    int status = 0;
    bool is_over = false;
    while (child == 0 && !is_over) {
      std::ifstream(list) >> child;
      is_over = ::waitpid(parent, &status, WNOHANG) != 0;
    }
    if (is_over) continue;
    ::usleep(static_cast<useconds_t>(100 * round));  // it has not yet asked the kernel to end it with its parent
    ::kill(child, SIGSTOP);
    ::kill(parent, SIGKILL);
    ::waitpid(parent, &status, 0);
    ::kill(child, SIGCONT);
    was_killed = ::waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
  EXPECT_TRUE(was_killed);
}

TEST(Hostile, ASmallObjectDoesNotDecodeToMuch) {
  const TempDir dir;
  const std::string frame = zstd_frame(std::string(std::size_t{17} << 20, '\0'));
  dcp::WrittenEntry entry{nullptr, "seed", {"seed"}, {}};
  entry.items.push_back({Box{}, 0, 0, static_cast<Index>(frame.size())});
  dir.write("ck/__0_0.distcp", frame);
  dir.write("ck/.metadata", dcp::write_metadata({entry}, {"__0_0.distcp"}));
  const CommandResult r = reshard_cli({"verify", dir / "ck"});
  EXPECT_EQ(r.exit_code, 1) << r.out << r.err;
  EXPECT_THAT(r.out, HasSubstr("expected at most 16777216 bytes"));
}

// An HDF5 file with 2,000 links to one dataset below six groups with names of 4,000 letters.
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
    // AddressSanitizer checks that it is loaded first; here the preloaded library comes before it.
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
}  // namespace reshard::hostile_test
