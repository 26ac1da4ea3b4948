// Tests our code that calls CUDA and NCCL against stand-ins of both (runtime.h, nccl.cc): what it leaves behind in its
// process, and what ranks do when another rank or the library does not respond.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "formats/dcp/dcp.h"
#include "formats/load.h"
#include "lib/base/memory_limit.h"
#include "lib/device/device.h"
#include "lib/transport/nccl.h"
#include "tests/cuda/stand_in/runtime.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_checks.h"
#include "tests/support/exchange_checks.h"
#include "tests/support/local_ranks.h"
#include "tests/support/mpirun.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

// Loads the stand-in by path first, because a sanitizer's dlopen does not search next to the program.
[[maybe_unused]] void* const kNcclLibrary = ::dlopen(RESHARD_STAND_IN_DIR "/libreshard_stand_in_nccl.so", RTLD_NOW);

using testing::HasSubstr;

const std::string kSource = sample("fsdp4_tp2") + "/checkpoint";

// Sets an environment variable until the end of the test.
class Environment {
 public:
  Environment(const char* name, const std::string& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
  ~Environment() { ::unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
};

std::unique_ptr<Device> open(const std::string& name) {
  auto device = open_device(name, 0);
  EXPECT_TRUE(device) << device.error().message();
  return std::move(*device);
}

int current_device() {
  int out = -1;
  EXPECT_EQ(cudaGetDevice(&out), cudaSuccess);
  return out;
}

TEST(StandInCuda, LeavesNoContextOnAnotherGpuAndTheCurrentDeviceAsItWas) {
  const int before = stand_in::accidental_contexts(0);
  std::thread([&] {  // a thread that has chosen no device
    const auto device = open("cuda:1");
    EXPECT_EQ(device->ordinal(), 1);
    const Status checked = check_chains(*device, 3);
    EXPECT_TRUE(checked) << checked.error().message();
    EXPECT_TRUE(device->settle());
    EXPECT_EQ(current_device(), 0);
  })
      .join();
  EXPECT_EQ(stand_in::accidental_contexts(0), before);
  EXPECT_EQ(stand_in::accidental_contexts(1), 0);
}

TEST(StandInCuda, MemoryMayEndInAThreadThatChoseNoDevice) {
  const auto device = open("cuda:1");
  auto memory = device->allocate(5000);
  auto stream = device->stream();
  ASSERT_TRUE(memory && stream);
  const int before = stand_in::accidental_contexts(0);
  std::thread([&] {
    *memory = nullptr;
    *stream = nullptr;
  }).join();
  EXPECT_EQ(stand_in::accidental_contexts(0), before);
}

TEST(StandInCuda, KeepsPinnedMemoryForTheNextAndGetsNoneForTheDeviceAlone) {
  const auto device = open("cuda:0");
  { EXPECT_TRUE(device->allocate(100000)); }
  const int before = stand_in::pinned_allocations();
  for (const Index bytes : {100000, 99999, 60000}) {
    const auto memory = device->allocate(bytes);
    ASSERT_TRUE(memory);
    const DeviceBuffer buffer = (*memory)->buffer();
    EXPECT_EQ(static_cast<Index>(buffer.host.size()), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.host.data()) % 4096, 0u);
  }
  const auto alone = device->allocate(Index{1} << 20, Sides::kDevice);
  ASSERT_TRUE(alone);
  EXPECT_TRUE((*alone)->buffer().host.empty());
  EXPECT_EQ((*alone)->buffer().device.size(), std::size_t{1} << 20);
  EXPECT_EQ(stand_in::pinned_allocations(), before);
  // Two devices that are open at once have a context each.
  const auto one = device->allocate(100000), other = device->allocate(100000);
  ASSERT_TRUE(one && other);
  EXPECT_NE((*one)->buffer().host.data(), (*other)->buffer().host.data());
  EXPECT_EQ(stand_in::pinned_allocations(), before + 1);
}

TEST(StandInCuda, FetchesAllDigestsOfAStreamAtOnce) {
  const auto device = open("cuda:0");
  const auto stream = device->stream();
  const auto memory = device->allocate(1000);
  ASSERT_TRUE(stream && memory);
  const stand_in::Queued before = stand_in::queued();
  Digest digests[5];
  for (Digest& digest : digests)
    ASSERT_TRUE((*stream)->digest_box({1000}, whole({1000}), 1, (*memory)->buffer().device.data(), &digest));
  ASSERT_TRUE((*stream)->wait());
  EXPECT_EQ(stand_in::queued().kernels, before.kernels + 5);
  EXPECT_EQ(stand_in::queued().downloads, before.downloads + 1);
  EXPECT_EQ(digests[4], digests[0]);
  EXPECT_NE(digests[0], Digest());
}

// The GPU, not the CPU, assembles columns of shards.
TEST(StandInCuda, LoadsAreUploadedAsTheyLieInSlabsOf8MiB) {
  const TempDir dir;
  const Dims shape = {2304, 2048};
  std::string bytes(static_cast<std::size_t>(volume(shape) * 2), '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * i >> 7 & 0x3f);
  LayoutRequest request;
  request.mesh = *Mesh::parse("tp=8");
  request.tensors.push_back({"w", DType::kFloat16, shape, {}, Placement{{{{"tp"}, 1}}}});
  const auto target = kDcpFormat.lay_out(std::move(request));
  ASSERT_TRUE(target);
  write_target({{"w", {DType::kFloat16, shape, bytes}}}, **target, dir / "source");

  const auto device = open("cuda:0");
  LoadOptions options;
  options.run.device = device.get();
  options.run.threads = 2;
  std::unique_ptr<Device::Memory> memory;
  const stand_in::Queued before = stand_in::queued();
  const auto report = load(dir / "source", options, [&](const LoadTensor& tensor) -> Result<Destination> {
    memory = TRY(device->allocate(tensor.bytes(), Sides::kDevice));
    return Destination{memory->buffer().device.data(), std::nullopt};
  });
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_TRUE(std::ranges::equal(memory->buffer().device, as_bytes(bytes)));
  const stand_in::Queued after = stand_in::queued();
  EXPECT_EQ(after.uploads, before.uploads + 2);
  EXPECT_EQ(after.downloads, before.downloads + 2);
  EXPECT_GE(after.kernels, before.kernels + 2 * 8);
}

TEST(StandInCuda, AnErrorOfOneCallIsNotThatOfTheNext) {
  const auto device = open("cuda:0");
  const auto stream = device->stream();
  auto from = device->allocate(4096), to = device->allocate(4096);
  ASSERT_TRUE(stream && from && to);
  stand_in::fail_next("cudaHostAlloc", cudaErrorMemoryAllocation);
  const auto none = device->allocate(Index{5} << 20);
  ASSERT_FALSE(none);
  EXPECT_THAT(none.error().message(), HasSubstr("cuda:0: allocating 5.24 MB of pinned memory: out of memory"));
  const Status copied =
      (*stream)->copy_box({8, 8}, 2, (*from)->buffer().device.data(), {16, 1}, (*to)->buffer().device.data(), {8, 1});
  EXPECT_TRUE(copied) << copied.error().message();
  EXPECT_TRUE((*stream)->wait());
}

TEST(StandInCuda, RefusesGpusThatItHasNoKernelsFor) {
  const Environment old("STAND_IN_CAPABILITY", "7");
  const auto named = open_device("cuda", 0), any = open_device("auto", 0);
  ASSERT_FALSE(named);
  EXPECT_EQ(named.error().code(), ErrorCode::kUnsupported);
  EXPECT_THAT(named.error().message(), HasSubstr("expected a GPU of compute capability 8.0 or higher, got 7.0"));
  ASSERT_TRUE(any);
  EXPECT_TRUE((*any)->is_cpu());
}

TEST(StandInCuda, ALoadWaitsForWhatTheCallerStillDoes) {
  const auto device = open("cuda:1");
  LoadOptions options;
  options.run.device = device.get();
  const auto opened = open_load(kSource, options);
  ASSERT_TRUE(opened) << opened.error().message();
  std::vector<std::unique_ptr<Device::Memory>> memory;
  std::vector<Destination> destinations;
  for (const LoadTensor& tensor : opened->load->tensors()) {
    memory.push_back(*device->allocate(tensor.bytes()));
    destinations.push_back({memory.back()->buffer().device.data(), std::nullopt});
  }
  // Like an engine that is still filling its parameters with zeros, on a stream of its own.
  std::promise<void> filled;
  std::thread([&] {
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    stand_in::queue(stream, [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      for (const auto& m : memory) std::fill(m->buffer().device.begin(), m->buffer().device.end(), std::byte{0});
      filled.set_value();
    });
  }).join();
  const auto report = opened->load->run(destinations);
  ASSERT_TRUE(report) << report.error().message();
  filled.get_future().wait();
  std::size_t zeros = 0;
  for (const auto& m : memory)
    zeros +=
        std::all_of(m->buffer().device.begin(), m->buffer().device.end(), [](std::byte b) { return b == std::byte{}; });
  EXPECT_EQ(zeros, 0u);
}

// ---- ranks

// Runs work(ranks, nccl, device) on threads that are ranks over NCCL, each with its own GPU.
Status on_gpus(int n, double patience,
               const std::function<Status(Transport& control, NcclRanks& nccl, Device& device)>& work) {
  const Environment gpus("STAND_IN_GPUS", std::to_string(n));
  const auto id = make_nccl_id();
  if (!id) return id.error();
  return run_local_ranks(n, [&](Transport& control) -> Status {
    const auto device = TRY(open_device("cuda:" + std::to_string(control.rank()), 0));
    const auto nccl = TRY(open_nccl(*id, control.rank(), n, {control.rank(), patience}, &control));
    return work(control, *nccl, *device);
  });
}

class StandInNccl : public testing::Test {
 protected:
  TempDir dir_;
  Environment temporary_{"TMPDIR", dir_.path()};
};

TEST_F(StandInNccl, ExchangesBetweenGpusAndParts) {
  for (const int n : {1, 2, 4}) {
    const Status done = on_gpus(n, 60, [](Transport&, NcclRanks& nccl, Device& device) -> Status {
      if (!nccl.moves_device_memory()) return internal_error("messages lie in the host's memory");
      TRY(check_exchange(device, nccl, 7));
      return nccl.part();
    });
    EXPECT_TRUE(done) << n << ": " << done.error().message();
  }
}

TEST_F(StandInNccl, ItsMemoryIsTheDrivers) {
  const Environment taken("STAND_IN_NCCL_BYTES", "300000000");
  const Index resident = resident_bytes(), held = held_bytes();
  const Status done = on_gpus(1, 60, [](Transport&, NcclRanks& nccl, Device&) { return nccl.part(); });
  EXPECT_TRUE(done) << done.error().message();
  EXPECT_GT(resident_bytes() - resident, 290'000'000);
  EXPECT_LT(held_bytes() - held, 10'000'000);
}

TEST_F(StandInNccl, LoadsTogetherIntoGpus) {
  const Status done = on_gpus(2, 60, [](Transport& control, NcclRanks& nccl, Device& device) -> Status {
    LoadOptions options;
    options.placement.mesh = TRY(Mesh::parse("tp=2"));
    options.run.strategy = Strategy::kExchange;
    options.run.ranks = &control;
    options.run.data = [&]() -> Result<Transport*> { return &nccl; };
    options.run.device = &device;
    options.run.threads = 2;
    const OpenLoad opened = TRY(open_load(kSource, options));
    std::vector<std::unique_ptr<Device::Memory>> memory;
    std::vector<Destination> destinations;
    for (const LoadTensor& tensor : opened.load->tensors()) {
      memory.push_back(TRY(device.allocate(tensor.bytes(), Sides::kDevice)));
      destinations.push_back({memory.back()->buffer().device.data(), std::nullopt});
    }
    const LoadReport report = TRY(opened.load->run(destinations));
    if (report.bytes_received == 0) return internal_error("nothing was sent");
    return nccl.part();
  });
  EXPECT_TRUE(done) << done.error().message();
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Returns a transfer that waits for rank 2 to send.
Result<std::unique_ptr<Transfer>> await_rank_2(NcclRanks& nccl, Device::Memory& memory) {
  return nccl.start({}, {{2, memory.buffer().device}});
}

TEST_F(StandInNccl, AFailedRankDoesNotKeepOthersFromFreeingMemory) {
  const auto begin = std::chrono::steady_clock::now();
  const Status done = on_gpus(3, 60, [](Transport& control, NcclRanks& nccl, Device& device) -> Status {
    if (control.rank() == 2) return corrupt("a bad file");
    auto memory = TRY(device.allocate(4096)), other = TRY(device.allocate(4096));
    const auto transfer = TRY(await_rank_2(nccl, *memory));
    other = nullptr;  // waits for all work of the GPU
    const Status waited = transfer->wait();
    if (waited) return internal_error("a message came that nobody sent");
    return waited;
  });
  EXPECT_LT(seconds_since(begin), 30);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().message(), "a bad file");
}

TEST_F(StandInNccl, WhatNobodyWaitedForIsAborted) {
  const int before = stand_in::accidental_contexts(0);
  const auto begin = std::chrono::steady_clock::now();
  const Status done = on_gpus(3, 60, [](Transport& control, NcclRanks& nccl, Device& device) -> Status {
    auto memory = TRY(device.allocate(4096));
    if (control.rank() == 0) {
      { TRY(await_rank_2(nccl, *memory)); }
      memory = nullptr;
      return corrupt("a bad file");
    }
    while (!control.stopped()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Error(ErrorCode::kPeer, "another rank failed");
  });
  EXPECT_LT(seconds_since(begin), 30);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().message(), "a bad file");
  EXPECT_EQ(stand_in::accidental_contexts(0), before) << "the threads of the other ranks' aborts";
}

TEST_F(StandInNccl, GivesUpAPeerThatNeverAnswersThoughAbortingBlocks) {
  const Environment stuck("STAND_IN_NCCL_STUCK", "1");
  const Status done = on_gpus(3, 0.3, [](Transport& control, NcclRanks& nccl, Device& device) -> Status {
    const auto memory = TRY(device.allocate(4096));
    if (control.rank() == 0) {
      const auto transfer = TRY(await_rank_2(nccl, *memory));
      const Status waited = transfer->wait();
      EXPECT_FALSE(transfer->wait()) << "aborted kernels ended, and nothing came";
      if (waited || waited.error().code() != ErrorCode::kPeer) return internal_error("it came");
      return io_error(waited.error().message());
    }
    while (!control.stopped()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Error(ErrorCode::kPeer, "another rank failed");
  });
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().message(), "nccl: messages: no response for 0 s");
}

TEST_F(StandInNccl, ARankThatCannotPartIsNotWaitedForLonger) {
  const Status done = on_gpus(2, 0.3, [](Transport& control, NcclRanks& nccl, Device&) -> Status {
    if (control.rank() == 1) {
      while (!control.stopped()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return Error(ErrorCode::kPeer, "another rank failed");
    }
    return nccl.part();
  });
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().message(), "nccl: parting: no response for 0 s");
}

TEST_F(StandInNccl, WhatFailsHereIsNoPeersFault) {
  const auto id = make_nccl_id();
  ASSERT_TRUE(id);
  Status refused[2];
  const Status done = run_local_ranks(2, [&](Transport& control) -> Status {
    const auto nccl = open_nccl(*id, control.rank(), 2, {.device = 0, .patience = 60}, nullptr);
    if (!nccl) refused[control.rank()] = nccl.error();
    return {};
  });
  ASSERT_TRUE(done);
  for (const Status& status : refused) {
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code(), ErrorCode::kIo);
    EXPECT_EQ(status.error().message(), "nccl: connecting: invalid usage");
  }
}

TEST_F(StandInNccl, RanksAgreeOnWhyTheyCannot) {
  const auto why = [](const std::vector<int>& devices) {
    std::vector<std::string> said(devices.size());
    const Status done = run_local_ranks(static_cast<int>(devices.size()), [&](Transport& control) -> Status {
      const auto rank = static_cast<std::size_t>(control.rank());
      said[rank] = TRY(why_no_nccl(control, devices[rank]));
      return {};
    });
    EXPECT_TRUE(done);
    for (const std::string& text : said) EXPECT_EQ(text, said[0]);
    return said[0];
  };
  EXPECT_EQ(why({0, 1}), "");
  EXPECT_EQ(why({0, -1}), "rank 1: no GPU");
  EXPECT_THAT(why({1, 0, 1}), HasSubstr("ranks 0 and 2 have the same GPU, GPU-5a0000"));
  EXPECT_EQ(why_no_nccl(std::vector<NcclMember>{{"a", "GPU-1", ""}, {"b", "", "nccl: cannot open it"}}),
            "rank 1: nccl: cannot open it");
}

// ---- the program

CommandResult on_gpu(std::vector<std::string> args, const std::vector<std::string>& env = {}) {
  args.insert(args.begin(), RESHARD_GPU_BINARY);
  return run_command(args, 60, env);
}

TEST(StandInProgram, CountsItsOwnMemoryAndNotTheDrivers) {
  const TempDir dir;
  const auto convert = [&](const std::string& memory, const std::string& out) {
    return on_gpu(
        {"convert", kSource, dir / out, "--to", "hf", "--device", "cuda", "--threads", "4", "--memory", memory},
        {"STAND_IN_CONTEXT_BYTES=300000000"});
  };
  const CommandResult done = convert("256MiB", "a");
  EXPECT_EQ(done.exit_code, 0) << done.err;
  const CommandResult plain =
      run_command({RESHARD_BINARY, "convert", kSource, dir / "b", "--to", "hf", "--threads", "4"});
  EXPECT_EQ(plain.exit_code, 0) << plain.err;
  EXPECT_TRUE(all_files(dir / "a") == all_files(dir / "b"));
}

struct Said {
  RanksResult ranks;
  bool opened = false;  // whether NCCL was opened
};
// Runs the program on two ranks with this number of GPUs, and with NCCL if `library` is set.
Said two_ranks(const std::string& gpus, bool library, const std::vector<std::string>& args) {
  const TempDir dir;
  std::filesystem::create_directory(dir / "tmp");
  std::vector<std::string> argv = {"/usr/bin/env", "STAND_IN_GPUS=" + gpus, "TMPDIR=" + (dir / "tmp")};
  if (library) argv.push_back("LD_LIBRARY_PATH=" RESHARD_STAND_IN_DIR);
  argv.emplace_back(RESHARD_GPU_BINARY);
  argv.insert(argv.end(), args.begin(), args.end());
  Said out{program_ranks(2, argv, dir / "logs")};
  for (const auto& entry : std::filesystem::directory_iterator(dir / "tmp"))
    out.opened = out.opened || entry.path().filename().string().starts_with("stand_in_nccl");
  return out;
}

class StandInRanks : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_mpirun()) GTEST_SKIP() << "built without MPI";
    const CommandResult plain = run_command({RESHARD_BINARY, "convert", kSource, dir_ / "expected", "--to", "hf"});
    ASSERT_EQ(plain.exit_code, 0) << plain.err;
  }
  Said convert(const std::string& gpus, bool library, const std::string& strategy,
               const std::vector<std::string>& more = {}) {
    std::vector<std::string> args = {"convert",  kSource, dir_ / "out", "--to", "hf",         "--force",
                                     "--device", "cuda",  "--threads",  "2",    "--strategy", strategy};
    args.insert(args.end(), more.begin(), more.end());
    return two_ranks(gpus, library, args);
  }
  void expect_equal(const Said& said, bool opened) {
    EXPECT_EQ(said.ranks.command.exit_code, 0) << said.ranks.command.err << said.ranks.err[0] << said.ranks.err[1];
    EXPECT_TRUE(all_files(dir_ / "out") == all_files(dir_ / "expected"));
    EXPECT_EQ(said.opened, opened);
  }
  TempDir dir_;
};

TEST_F(StandInRanks, ExchangeOverNcclAndEndInGoodOrder) { expect_equal(convert("2", true, "exchange"), true); }
TEST_F(StandInRanks, OpenNothingWhereNothingIsExchanged) { expect_equal(convert("2", true, "direct"), false); }
TEST_F(StandInRanks, TakeMpiWhereTheyHaveOneGpu) { expect_equal(convert("1", true, "exchange"), false); }
TEST_F(StandInRanks, TakeMpiWhereThereIsNoLibrary) { expect_equal(convert("2", false, "exchange"), false); }

TEST_F(StandInRanks, SayWhyNcclCannotBeWhereItIsInsistedOn) {
  const Said shared = convert("1", true, "exchange", {"--transport", "nccl"});
  EXPECT_EQ(shared.ranks.command.exit_code, 6);
  EXPECT_THAT(shared.ranks.err[0], HasSubstr("--transport nccl: ranks 0 and 1 have the same GPU"));
  const Said without = convert("2", false, "exchange", {"--transport", "nccl"});
  EXPECT_EQ(without.ranks.command.exit_code, 6);
  EXPECT_THAT(without.ranks.err[0], HasSubstr("--transport nccl: rank 0: nccl: cannot open libreshard_stand_in_nccl"));
}

// ---- bench.sh

// Runs the benchmark with small sizes.
CommandResult bench(std::vector<std::string> more, const std::vector<std::string>& env) {
  const TempDir dir;
  std::filesystem::create_directory(dir / "programs");
  std::filesystem::create_symlink(RESHARD_GPU_LOAD, dir / "programs/load_cuda");
  std::filesystem::create_symlink(RESHARD_BINARY, dir / "programs/reshard");
  std::vector<std::string> argv = {RESHARD_SOURCE_DIR "/tests/cuda/bench.sh",
                                   "--bench",
                                   RESHARD_GPU_BENCH,
                                   "--programs",
                                   dir / "programs",
                                   "--model",
                                   "llama3-tiny",
                                   "--dir",
                                   dir.path(),
                                   "--bytes",
                                   "1MiB",
                                   "--file",
                                   "1MiB",
                                   "--chunks",
                                   "256KiB,512KiB",
                                   "--threads",
                                   "1,2",
                                   "--rounds",
                                   "1",
                                   "--times",
                                   "1",
                                   "--warm-up",
                                   "0",
                                   "--no-large"};
  argv.insert(argv.end(), more.begin(), more.end());
  return run_command(argv, 60, env);
}

TEST(StandInBench, PrintsItsTablesThoughACheckFails) {
  const CommandResult r = bench({"--no-exchange"}, {"STAND_IN_FLAW=4095"});
  EXPECT_EQ(r.exit_code, 1) << r.err;
  EXPECT_THAT(r.out, HasSubstr("FAILED: transfers: a transfer: byte 4094 of 4095"));
  for (const char* row : {"| device-to-device copy  ", "| transpose of 512 x 512, 2 B ", "| digest, 1 B elements ",
                          "| both at once, each way ", "| page cache -> host -> device -> digest ",
                          "| 524 kB x 2 threads  ", "| through the device, with digests ", "| hf, cold ",
                          "| hf, page cache, 8 threads  ", "| dcp-tp8, page cache, 32 threads  "})
    EXPECT_THAT(r.out, HasSubstr(row));
  EXPECT_THAT(r.out, testing::ContainsRegex("\\| device-to-device copy +\\| +[0-9.]+ \\| 100.0 % \\|"));
  EXPECT_THAT(r.out, testing::ContainsRegex("\\| hf, page cache, 8 threads +\\| +[0-9.]+ \\| +[0-9.]+ % \\|"));
  EXPECT_THAT(r.out, testing::Not(HasSubstr("| FAILED |")));
}

TEST(StandInBench, TimesEachLinkBetweenGpus) {
  const TempDir dir;
  const CommandResult r = bench({"--no-checks", "--no-load"},
                                {"STAND_IN_GPUS=3", "TMPDIR=" + dir.path(), "LD_LIBRARY_PATH=" RESHARD_STAND_IN_DIR});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  for (const char* row : {"| 8 ranks  ", "| cuda:0 and cuda:1  ", "| cuda:0 and cuda:2  ", "| cuda:1 and cuda:2  ",
                          "| all 3 in a ring  "})
    EXPECT_THAT(r.out, HasSubstr(row));
  EXPECT_THAT(r.out, testing::ContainsRegex("\\| cuda:[0-2] and cuda:[0-2] +\\| +[0-9.]+ \\| 100.0 % \\|"));
}

// Adds the sources of all headers that a file includes, directly or through others.
void add_needed(const std::string& file, std::set<std::string>& seen, std::set<std::string>& sources) {
  if (!seen.insert(file).second) return;
  std::ifstream in(RESHARD_SOURCE_DIR "/" + file);
  std::stringstream text;
  text << in.rdbuf();
  const std::string all = text.str();
  const std::regex include("#include \"([^\"]+)[.]h\"");
  for (std::sregex_iterator it(all.begin(), all.end(), include), end; it != end; ++it) {
    const std::string name = (*it)[1];
    add_needed(name + ".h", seen, sources);
    if (std::filesystem::exists(RESHARD_SOURCE_DIR "/" + name + ".cc")) sources.insert(name + ".cc");
  }
}

// Runs bench.sh with a compiler that records what it is to compile.
void expect_complete_bench(bool nccl) {
  const TempDir dir;
  const auto script = [&](const std::string& name, const std::string& body) {
    std::ofstream(dir / name) << "#!/bin/bash\n" << body << '\n';
    std::filesystem::permissions(dir / name, std::filesystem::perms::owner_all);
  };
  std::filesystem::create_directory(dir / "bin");
  script("bin/nvidia-smi", "echo 9.0");
  if (nccl) {
    std::filesystem::create_directories(dir / "nccl/include");
    script("nccl/include/nccl.h", "");
  }
  script("bin/nvcc",
         "args=(\"$@\")\n"
         "for i in \"${!args[@]}\"; do\n"
         "  case ${args[i]} in\n"
         "    --version) echo 'release 13.0' ;;\n"
         "    -c) echo \"${args[i + 1]} $*\" >> '" +
             dir / "compiled" +
             "' ;;\n"
             "    -o) printf '#!/bin/bash\\nexit 77\\n' > \"${args[i + 1]}\"; chmod +x \"${args[i + 1]}\" ;;\n"
             "  esac\n"
             "done");
  const CommandResult r =
      run_command({RESHARD_SOURCE_DIR "/tests/cuda/bench.sh"}, 60,
                  {"PATH=" + dir / "bin" + ":" + std::getenv("PATH"), "NCCL_HOME=" + dir / "nccl", "CUDA_ARCH="});
  EXPECT_EQ(r.exit_code, 77) << r.err;
  if (!nccl) {
    EXPECT_THAT(r.err, HasSubstr("no nccl.h: the exchange is left out"));
  }
  std::set<std::string> compiled, needed, seen;
  std::ifstream log(dir / "compiled");
  for (std::string line; std::getline(log, line);) {
    EXPECT_THAT(line, HasSubstr(" -arch=sm_90 "));
    compiled.insert(line.substr(0, line.find(' ')));
  }
  for (const std::string& source : compiled) add_needed(source, seen, needed);
  if (!nccl) needed.erase("lib/transport/nccl.cc");
  for (const char* part : {"storage", "likely_reads", "read_ahead"})  // tests/cuda/no_storage.cc replaces them
    needed.erase("lib/base/storage/" + std::string(part) + ".cc");
  EXPECT_TRUE(compiled.contains(nccl ? "lib/transport/nccl.cc" : "lib/transport/nccl_absent.cc"));
  EXPECT_TRUE(compiled.contains("lib/device/cuda/kernels.cu"));
  for (const std::string& source : needed) EXPECT_TRUE(compiled.contains(source)) << source;
}

// bench.sh lists all sources that a program needs, so it builds on a machine with only a compiler.
TEST(StandInBench, IsBuiltOfAllThatItIncludes) {
  expect_complete_bench(true);
  expect_complete_bench(false);
}

TEST(StandInBench, SaysWhatIsNotHere) {
  const CommandResult r = bench({"--no-checks", "--no-load"}, {});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("not here: nccl: cannot open libreshard_stand_in_nccl.so"));
  const CommandResult none = bench({"--no-load"}, {"STAND_IN_GPUS=0"});
  EXPECT_EQ(none.exit_code, 77);
  EXPECT_THAT(none.err, HasSubstr("no CUDA device: cuda: no GPU can be used"));
}

}  // namespace
}  // namespace reshard
