// Tests commands without memory: each allocation of a scenario fails in turn, alone or with all later ones. The command
// must report the lack of memory or succeed; nothing incomplete looks finished, and the next run gives the usual
// output.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <regex>

#include "formats/open.h"
#include "lib/base/syscalls.h"
#include "lib/convert/conversion.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::allocation_fault_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::IsEmpty;
using Files = std::map<std::string, std::string>;

struct Scenario {
  std::string name;
  std::vector<std::string> args;  // arguments of reshard; "OUT" stands for the destination
  bool writes = false;
  std::string left = "";  // an earlier run's leftover, as OUT.partial
};

class AllocationTest : public testing::Test {
 protected:
  // Runs `args` with the n-th allocation failing; 0: none fails.
  CommandResult run(std::vector<std::string> args, std::int64_t n, bool all = false) const {
    args.insert(args.begin(), RESHARD_BINARY);
    for (std::string& arg : args)
      if (arg == "OUT") arg = out_;
    const std::string count = dir_ / "count";
    write_file(count, std::string(16, '\0'));
    return run_command(args, 60,
                       {"LD_PRELOAD=" RESHARD_ALLOCATION_FAULT, "MALLOC_PERTURB_=165",
                        "RESHARD_ALLOCATION_FAULT=" + std::to_string(n) + (all ? " all " : " once ") + count});
  }
  // Of the last run: the number of allocations, and whether libhdf5 was among the callers of one that failed.
  std::int64_t allocations() const { return number(0); }
  bool failed_in_hdf5() const { return number(1) > 0; }
  Files files() const {
    if (!fs::exists(out_)) return {};
    return fs::is_directory(out_) ? all_files(out_) : Files{{"", read_file(out_)}};
  }
  void prepare(const Scenario& s) const {
    fs::remove_all(out_);
    fs::remove_all(out_ + ".partial");
    if (!s.left.empty()) fs::copy(s.left, out_ + ".partial", fs::copy_options::recursive);
  }
  std::vector<Scenario> scenarios() const;

  std::int64_t number(std::size_t i) const {
    std::int64_t n = 0;
    std::memcpy(&n, read_file(dir_ / "count").data() + i * sizeof n, sizeof n);
    return n;
  }

  TempDir dir_;
  std::string out_ = dir_ / "out";
};

// Leaves the start of a conversion that found the disk full.
void leave_unfinished(const std::string& source, const std::string& path) {
  static Syscalls real;
  static int writes;
  real = sys();
  writes = 0;
  Syscalls calls = real;
  calls.pwrite = [](int fd, const void* bytes, std::size_t n, off_t offset) {
    return ++writes > 10 ? (errno = ENOSPC, ssize_t{-1}) : real.pwrite(fd, bytes, n, offset);
  };
  const ScopedSyscalls scoped(calls);
  auto open = open_checkpoint(source);
  ASSERT_TRUE(open) << open.error().message();
  ConversionOptions o;
  o.source_path = source;
  o.config_path = sample("tp8") + "/config.json";
  o.selection.include = {"layers.0.*", "norm.weight"};
  o.group_bytes = 10'000;
  o.run.threads = 1;
  o.run.memory = Index{1} << 30;
  const auto conversion = Conversion::prepare(*open->reader, *find_format("dcp").value(), std::move(o));
  ASSERT_TRUE(conversion) << conversion.error().message();
  ASSERT_FALSE((*conversion)->run({path}));
  ASSERT_TRUE(fs::exists(path + ".partial"));
}

std::vector<Scenario> AllocationTest::scenarios() const {
  const std::string small = test_data("dcp_small/ck1"), tp8 = sample("tp8") + "/checkpoint", model = dir_ / "model",
                    twin = dir_ / "twin", archive = dir_ / "archive.h5", begun = dir_ / "begun";
  const std::vector<std::string> part = {"--include", "layers.0.*", "--include", "norm.weight", "--threads", "1"};
  const auto with = [](std::vector<std::string> a, const std::vector<std::string>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  for (const std::string& path : {model, twin, archive}) {
    const CommandResult r = reshard_cli(with({"convert", tp8, path, "--to", path == archive ? "hdf5" : "hf"}, part));
    EXPECT_EQ(r.exit_code, 0) << r.err;
  }
  leave_unfinished(tp8, begun);
  return {
      {"inspect", {"inspect", small}},
      {"verify", {"verify", small, "--threads", "1"}},
      {"dcp to hf", with({"convert", tp8, "OUT", "--to", "hf"}, part), true},
      {"hf to dcp", {"convert", model, "OUT", "--to", "dcp", "--mesh", "tp=2", "--threads", "1"}, true},
      {"dcp to hdf5 with zstd", with({"convert", tp8, "OUT", "--to", "hdf5", "--codec", "zstd:1"}, part), true},
      {"hf to dcp in two threads", {"convert", model, "OUT", "--to", "dcp", "--mesh", "tp=2", "--threads", "2"}, true},
      {"merge", {"merge", model, twin, "OUT", "--average", "--to", "hf", "--allow", "config", "--threads", "1"}, true},
      {"resume", with({"convert", tp8, "OUT", "--to", "dcp"}, part), true, begun + ".partial"},
      {"hdf5 to bin", {"convert", archive, "OUT", "--to", "bin", "--allow", "config", "--threads", "1"}, true},
      {"megatron to hf",
       {"convert", test_data("megatron/dist_tp2_optim"), "OUT", "--to", "hf", "--threads", "1"},
       true},
      {"megatron-legacy to ranks",
       {"convert", test_data("megatron/legacy_tp2_ep2_moe_plain"), "OUT", "--to", "ranks", "--threads", "1"},
       true},
      {"deepspeed to dcp", {"convert", test_data("deepspeed/z2_fp16"), "OUT", "--to", "dcp", "--threads", "1"}, true},
      {"fsdp to torch_checkpointing",
       {"convert", test_data("fsdp/fsdp2_tp2"), "OUT", "--to", "torch_checkpointing", "--threads", "1"},
       true},
      {"nanotron to vllm", {"convert", test_data("nanotron/tp2"), "OUT", "--to", "vllm", "--threads", "1"}, true},
      {"meta to colossalai",
       {"convert", test_data("meta/llama2-tp2"), "OUT", "--to", "colossalai", "--threads", "1"},
       true},
      {"diff", {"diff", model, twin, "--threads", "1"}},
      {"plan", {"plan", tp8, "--to", "megatron", "--mesh", "tp=2,pp=2"}},
      {"layout", {"layout", small}},
  };
}

// Returns the files of an output, without the marker that an unfinished run may have left in it.
Files data_of(Files files) {
  std::erase_if(files, [](const auto& file) { return file.first.starts_with(".reshard-partial"); });
  return files;
}

// Returns a command's output without times, rates and other values that vary, and without values of objects that could
// not be read.
std::string without_times(const std::string& text) {
  static const std::regex kTimes(
      R"([0-9.]+ (ms|s|k?B/s|[MG]B/s)\b|(disk free|peak memory|memory) +[0-9.]+ .?B| = (\[[^\]\n]*\]|[^,\n]+))");
  return std::regex_replace(text, kTimes, "");
}

TEST_F(AllocationTest, EachThatFailsIsAnErrorThatSaysSo) {
  if (kSanitized) GTEST_SKIP() << "the sanitizers have an allocator of their own";
  // In the soak, the last allocations, which belong to the work itself, are tried more densely than those before it.
  const std::int64_t step = in_soak() ? 61 : 1499, of_last = in_soak() ? 5 : step, last = 2'000;
  std::int64_t runs = 0, errors = 0, equal = 0, deaths = 0, way = 0;
  for (const Scenario& s : scenarios()) {
    prepare(s);
    const CommandResult healthy = run(s.args, 0);
    ASSERT_EQ(healthy.exit_code, 0) << s.name << healthy.err;
    const std::int64_t total = allocations();
    const Files expected = files();
    EXPECT_EQ(expected.empty(), !s.writes);
    if (!s.left.empty()) {
      EXPECT_THAT(healthy.out, HasSubstr("resuming " + out_ + ".partial"));
    }
    for (std::int64_t n = 1 + way++ % step; n <= total; n += total - n > last ? step : of_last, ++runs) {
      const bool all = runs % 3 == 2;
      prepare(s);
      const CommandResult r = run(s.args, n, all);
      SCOPED_TRACE(s.name + ", allocation " + std::to_string(n) + " of " + std::to_string(total) +
                   (all ? " and all after it" : "") + "\nexit code " + std::to_string(r.exit_code) + "\n" + r.out +
                   r.err);
      EXPECT_FALSE(r.timed_out);
      if (r.exit_code == 0) {
        ++equal;
        EXPECT_EQ(files(), expected);
        EXPECT_EQ(without_times(r.out), without_times(healthy.out));
        EXPECT_FALSE(fs::exists(out_ + ".partial"));
        continue;
      }
      ++errors;
      // libhdf5 sometimes crashes without memory. The C library aborts if it cannot load the unwinder for a thread's
      // exception.
      const bool is_without_unwinder = r.err.find("libgcc_s.so.1 must be installed") != std::string::npos;
      if ((failed_in_hdf5() || is_without_unwinder) && r.exit_code > 128) {
        ++deaths;
      } else if (s.name == "verify" && r.exit_code == 1) {  // the other checks continue
        EXPECT_THAT(r.out, AllOf(HasSubstr("The system returned an error"), HasSubstr("out of memory")));
      } else if (failed_in_hdf5() &&
                 r.err.find("libhdf5 says") != std::string::npos) {  // the library's own guess at the reason
        EXPECT_THAT(r.exit_code, AnyOf(4, 5, 70));
      } else {
        EXPECT_EQ(r.exit_code, 5);
        EXPECT_THAT(r.err, AnyOf(HasSubstr("out of memory"), HasSubstr("Cannot allocate memory")));
      }
      if (!s.writes) continue;
      if (fs::exists(out_)) {  // the failure came after publication
        EXPECT_EQ(data_of(files()), expected);
        continue;
      }
      if (!fs::exists(out_ + ".partial") && runs % 20 != 0) continue;
      const CommandResult again = run(s.args, 0);
      EXPECT_EQ(again.exit_code, 0) << again.err;
      EXPECT_EQ(files(), expected);
      EXPECT_FALSE(fs::exists(out_ + ".partial"));
    }
  }
  std::printf("%lld runs: %lld errors, %lld of them deaths in libraries, %lld went well without the memory\n",
              static_cast<long long>(runs), static_cast<long long>(errors), static_cast<long long>(deaths),
              static_cast<long long>(equal));
  EXPECT_GT(errors, runs / 2);
}

// Returns the files of a tree that can be read to their end, and collects the errors of the others.
Files read_tree(const std::string& directory, std::vector<int>& failed) {
  Files out;
  std::error_code error;
  for (auto entry = fs::recursive_directory_iterator(directory, error); !error && entry != fs::end(entry);
       entry.increment(error)) {
    if (!entry->is_regular_file(error)) continue;
    const int fd = ::open(entry->path().c_str(), O_RDONLY);
    std::string bytes(1 << 20, '\0'), all;
    ssize_t n = fd < 0 ? -1 : 0;
    while (fd >= 0 && (n = ::pread(fd, bytes.data(), bytes.size(), std::ssize(all))) > 0)
      all.append(bytes, 0, static_cast<std::size_t>(n));
    if (n < 0) {
      failed.push_back(errno);
    } else {
      out[fs::relative(entry->path(), directory)] = all;
    }
    if (fd >= 0) ::close(fd);
  }
  if (error) failed.push_back(error.value());
  return out;
}

// Returns whether a process has ended; a zombie counts as ended.
bool is_gone(pid_t process) {
  if (process == 0 || ::kill(process, 0) != 0) return true;
  return read_file("/proc/" + std::to_string(process) + "/stat").find(") Z") != std::string::npos;
}

// A mount without memory keeps running and answers requests with an error.
TEST_F(AllocationTest, AMountThatGetsNoneAnswersAllTheSame) {
  if (kSanitized) GTEST_SKIP() << "the sanitizers have an allocator of their own";
  fs::create_directory(out_);
  const std::string log = dir_ / "log";
  const std::vector<std::string> args = {
      "mount", test_data("deepspeed/z2_fp16"), "OUT", "--as", "hf", "--background", "--log", log, "--threads", "2"};
  pid_t process = 0;
  const auto mount = [&](std::int64_t n, bool all) {
    fs::remove(log);
    const CommandResult r = run(args, n, all);
    std::smatch found;
    process = std::regex_search(r.out, found, std::regex("process ([0-9]+)")) ? std::stoi(found[1]) : 0;
    return r;
  };
  // Returns whether the process was still there to be ended.
  const auto unmount = [&] {
    const bool was_there = !is_gone(process);
    if (was_there) ::kill(process, SIGTERM);
    for (int i = 0; i < 500 && !is_gone(process); ++i) ::usleep(20'000);
    EXPECT_TRUE(is_gone(process));
    (void)::umount2(out_.c_str(), MNT_DETACH);
    return was_there;
  };
  const CommandResult healthy = mount(0, false);
  if (healthy.exit_code == 4) GTEST_SKIP() << healthy.err;
  ASSERT_EQ(healthy.exit_code, 0) << healthy.err;
  const std::int64_t ready = allocations();
  std::vector<int> none;
  const Files expected = read_tree(out_, none);
  EXPECT_TRUE(unmount());
  EXPECT_THAT(none, IsEmpty());
  const std::int64_t total = allocations();
  EXPECT_GT(total, ready);
  std::int64_t runs = 0, errors = 0, ends = 0, files = 0;
  for (std::int64_t n = 1; n <= total; n += n < ready ? (in_soak() ? 97 : 4999) : (in_soak() ? 1 : 23), ++runs) {
    const bool all = runs % 3 == 2;
    const CommandResult r = mount(n, all);
    SCOPED_TRACE("allocation " + std::to_string(n) + " of " + std::to_string(total) + (all ? " and all after it" : "") +
                 "\nexit code " + std::to_string(r.exit_code) + "\n" + r.out + r.err);
    if (r.exit_code != 0) {
      ++errors;
      EXPECT_EQ(r.exit_code, 5);
      EXPECT_THAT(r.err, AnyOf(HasSubstr("out of memory"), HasSubstr("Cannot allocate memory")));
      continue;
    }
    std::vector<int> failed;
    for (const auto& [name, bytes] : read_tree(out_, failed)) EXPECT_TRUE(bytes == expected.at(name)) << name;
    files += std::ssize(failed);
    // Readers of a mount that ends on its own get the errors of a mount that is gone.
    const bool has_others = std::any_of(failed.begin(), failed.end(), [](int e) { return e != EIO && e != ENOMEM; });
    if (unmount() && !has_others) continue;
    ++ends;
    EXPECT_THAT(read_file(log), AnyOf(HasSubstr("out of memory"), HasSubstr("Cannot allocate memory")));
  }
  std::printf("%lld runs: %lld errors at the beginning, %lld ends, %lld files that could not be read\n",
              static_cast<long long>(runs), static_cast<long long>(errors), static_cast<long long>(ends),
              static_cast<long long>(files));
}

}  // namespace
}  // namespace reshard::allocation_fault_test
